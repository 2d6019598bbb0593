"""From two models and a task to a `Comparison`: the whole pipeline, and its result.

Both models read the same prompts. Each one's heads and MLPs are ablated (influence), their outputs
and attention patterns recorded (similarity), and the transport plan between the two influence
profiles gives the alignment and the story: what matches what, what was merged, split and dropped.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.activations import Components, record_components
from circuitkd.circuits.influence import ABLATIONS, Influence, node_influence
from circuitkd.compare._details import with_details
from circuitkd.compare._loading import ModelLike, Progress, load_with_progress
from circuitkd.compare._robustness_inputs import parameter_count
from circuitkd.compare._warnings import UNPROCESSED
from circuitkd.compare.evidence import NULL_DRAWS
from circuitkd.compare.recorded import compare_recorded
from circuitkd.compare.result import Comparison, Performance, load_comparison
from circuitkd.compare.similarity import RECORDED_MEASURES
from circuitkd.errors import InputError
from circuitkd.models import family_of_model, reinitialised
from circuitkd.prompts import PromptGroup, Prompts, compared_positions
from circuitkd.runs import NO_CHECKPOINT, Checkpoint, ScopedCheckpoint
from circuitkd.tasks import Task, load_task

__all__ = ["Comparison", "Performance", "compare", "compare_recorded", "load_comparison"]

PRESETS = ("default", "paper")
MINIMUM_PROMPTS = 8
RANDOM_STUDENTS = 5


def compare(
    teacher: ModelLike,
    student: ModelLike,
    task: str | Path | Task,
    *,
    n: int = 100,
    seed: int = 0,
    ablation: str = "mean",
    preset: str = "default",
    measure: str = "default",
    bos: str = "auto",
    variant: str | None = None,
    batch_size: int | None = None,
    draws: int = 1000,
    null_draws: int = NULL_DRAWS,
    random_students: int = RANDOM_STUDENTS,
    details: bool = False,
    device: str | None = None,
    dtype: str = "float32",
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the circuits with which a teacher and a student solve a task.

    Args:
        teacher: a name, directory, or model in memory (see ``load_model``).
        student: likewise.
        task: a shipped task's name, a path to a task file, or a ``Task``.
        n: prompts; the same ones for both models.
        seed: of the prompts and of the bootstrap.
        ablation: ``mean``, ``zero`` or ``resample`` (see ``node_influence``).
        preset: ``paper`` takes the paper's settings (no BOS, processed weights, each student
            component with its best teacher) and puts the paper's number first; both numbers are
            there in either preset.
        measure: of similarity, one of ``compare.similarity.RECORDED_MEASURES``. The intervals of
            those that cannot be resampled over prompts resample influences alone.
        bos: ``auto``, ``none`` or a token (see ``Task.sample``).
        variant: an out-of-distribution variant of the task.
        batch_size: prompts that go through a model at once.
        draws: bootstrap samples behind the interval; 0 for none.
        null_draws: shuffles behind the null; 0 for no null, ceiling or floor.
        random_students: randomly initialised students behind the floor. Each costs what measuring
            the student costs; 0 for no floor.
        details: also measure the roles of all heads, put the strongest matches to the swap test,
            and see how both models behave on perturbed inputs.
        device: where models given by name run.
        dtype: of the weights of models given by name.
        checkpoint: keeps finished parts, so that an interrupted comparison goes on.
        progress: called as ``progress(stage, done, total)``; total 0 where nobody knows it.

    Raises:
        InputError: a wrong argument, model, or task; before any long work.

    >>> import circuitkd as ckd
    >>> result = ckd.compare("tiny-teacher", "tiny-teacher", "numerals", n=8, null_draws=0)
    >>> round(result.alignment.value, 6)
    1.0
    """
    _check(
        n, ablation, preset, measure,
        draws=draws, null_draws=null_draws, random_students=random_students,
    )  # fmt: skip
    task = task if isinstance(task, Task) else load_task(task)
    processed = preset == "paper"
    load = partial(
        load_with_progress, progress=progress, device=device, dtype=dtype, processed=processed
    )
    models = load(teacher), load(student)
    bos = "none" if processed and bos == "auto" else bos
    pair = task.sample_pair(*models, n, seed, variant=variant, bos=bos)
    config = {
        "teacher": str(models[0].cfg.model_name),
        "student": str(models[1].cfg.model_name),
        "task": task.name,
        "variant": variant,
        "n": n,
        "seed": seed,
        "ablation": ablation,
        "preset": preset,
        "measure": measure,
        "bos": bos,
        "bos_text": {"teacher": pair[0].bos, "student": pair[1].bos},
        "masked": {
            side: family_of_model(model).masked
            for side, model in zip(("teacher", "student"), models, strict=True)
        },
        "processed": processed,
        "dtype": dtype,
        "draws": draws,
        "null_draws": null_draws,
        "random_students": random_students,
    }
    kept = NO_CHECKPOINT if checkpoint is None else checkpoint
    places = [compared_positions(*groups) for groups in _group_pairs(pair)]
    config["positions"] = _coverage(pair, places)

    def measured(model: TransformerBridge, side: int, name: str) -> tuple[Influence, Components]:
        influence = node_influence(
            model,
            pair[side],
            ablation=ablation,
            batch_size=batch_size,
            checkpoint=ScopedCheckpoint(kept, f"{name}/"),
            progress=progress,
        )
        components = record_components(
            model,
            pair[side],
            [group[side] for group in places],
            batch_size=batch_size,
            progress=progress,
        )
        return influence, components

    def random_ones() -> Iterator[tuple[Influence, Components]]:
        for number in range(random_students if null_draws else 0):
            model = reinitialised(models[1], seed + number, processed=processed)
            yield measured(model, 1, f"random student {number}")

    teacher_side, student_side = (
        measured(models[side], side, name) for side, name in enumerate(("teacher", "student"))
    )
    loaded = [isinstance(model, TransformerBridge) for model in (teacher, student)]
    notes = [UNPROCESSED] if processed and any(loaded) else []
    result = compare_recorded(
        {"teacher": teacher_side[0], "student": student_side[0]},
        (teacher_side[1], student_side[1]),
        config,
        notes,
        parameters={"teacher": parameter_count(models[0]), "student": parameter_count(models[1])},
        random_students=random_ones(),
        progress=progress,
    )
    if not details:
        return result
    return with_details(
        result, models, pair, task, batch_size=batch_size, checkpoint=kept, progress=progress
    )


def _check(n: int, ablation: str, preset: str, measure: str, **counts: int) -> None:
    if n < MINIMUM_PROMPTS:
        raise InputError(f"n={n} is too few prompts to compare circuits: take at least 8.")
    if ablation not in ABLATIONS:
        raise InputError(f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}.")
    if preset not in PRESETS:
        raise InputError(f"Unknown preset {preset!r}: choose one of {', '.join(PRESETS)}.")
    if measure not in RECORDED_MEASURES:
        known = ", ".join(RECORDED_MEASURES)
        raise InputError(f"Unknown measure {measure!r}: choose one of {known}.")
    for name, count in counts.items():
        if count < 0:
            raise InputError(f"{name}={count} cannot be negative.")


def _group_pairs(pair: tuple[Prompts, Prompts]) -> list[tuple[PromptGroup, PromptGroup]]:
    return list(zip(pair[0].groups, pair[1].groups, strict=True))


def _coverage(pair: tuple[Prompts, Prompts], places: list[tuple[Tensor, Tensor]]) -> str:
    """Whether the compared positions are ``all``, or only the ``labelled`` ones of some group."""
    lengths = [min(a.clean.shape[1], b.clean.shape[1]) for a, b in _group_pairs(pair)]
    whole = [here.shape[1] == n for (here, _), n in zip(places, lengths, strict=True)]
    return "all" if all(whole) else "labelled"
