"""How robust a student is, next to its teacher.

*Brittleness under ablation* (`ablation_brittleness`, `brittleness_of`): what the metric loses when
one component is taken away; the published statistics, and what they lack: intervals over prompts, a
total that does not depend on how many components there are, and logits where percentages of a weak
baseline would mean nothing.

*Behaviour under perturbed inputs* (`robustness`): accuracy and metric of both models on the task's
out-of-distribution variants and under noise on the embeddings, and how often they agree.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.influence import ABLATIONS, node_influence
from circuitkd.circuits.influence_result import Influence
from circuitkd.compare._loading import ModelLike, Progress, load_with_progress
from circuitkd.compare._robustness_brittleness import (
    Brittleness,
    PairedBrittleness,
    ablation_brittleness,
    brittleness_of,
    require_same_prompts,
)
from circuitkd.compare._robustness_inputs import CLEAN, Condition, answers, parameter_count
from circuitkd.compare._robustness_result import Robustness, load_robustness
from circuitkd.compare._robustness_statistics import clamped_drops, severity_tail
from circuitkd.compare._warnings import FEW_PROMPTS, competence_warnings
from circuitkd.errors import InputError, VocabularyError
from circuitkd.models import tokenizer_of
from circuitkd.prompts import Prompts
from circuitkd.runs import NO_CHECKPOINT, Checkpoint, ScopedCheckpoint, versions
from circuitkd.tasks import Task, load_task

__all__ = [
    "NOISE",
    "Brittleness",
    "Condition",
    "PairedBrittleness",
    "Robustness",
    "ablation_brittleness",
    "brittleness_of",
    "clamped_drops",
    "load_robustness",
    "parameter_count",
    "robustness",
    "severity_tail",
]

Pair = tuple[Prompts, Prompts]

NOISE = (0.25, 0.5, 0.75, 1.0)
MINIMUM_PROMPTS = 8
_SIDES = ("teacher", "student")


def robustness(
    teacher: ModelLike,
    student: ModelLike,
    task: str | Path | Task,
    *,
    n: int = 100,
    seed: int = 0,
    variant: str | None = None,
    variants: Sequence[str] | None = None,
    noise: Sequence[float] = NOISE,
    ablation: str | None = "mean",
    influences: Mapping[str, Influence] | None = None,
    bos: str = "auto",
    batch_size: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Robustness:
    """How a student bears perturbed inputs and ablated components, next to its teacher.

    Args:
        teacher: a name, directory, or model in memory (see ``load_model``).
        student: likewise.
        task: a shipped task's name, a path to a task file, or a ``Task``.
        n: prompts under each condition; the same ones for both models.
        seed: of the prompts and of the noise.
        variant: the variant that counts as the task as it is, where that is not the task itself.
        variants: out-of-distribution variants of the task; by default all others that both
            tokenizers can pose (what is left out is in ``warnings``).
        noise: standard deviations of Gaussian noise on the embeddings, relative to the root mean
            square of the prompts' token embeddings (see ``Robustness``).
        ablation: of the brittleness part: ``mean``, ``zero``, ``resample``, or ``None`` to leave
            that part out.
        influences: of ``"teacher"`` and ``"student"``, where they are known already (say,
            ``Comparison.influences``): nothing is ablated then.
        bos: ``auto``, ``none`` or a token (see ``Task.sample``).
        batch_size: prompts that go through a model at once.
        device: where models given by name run.
        dtype: of the weights of models given by name.
        checkpoint: keeps finished parts, so that an interrupted call goes on.
        progress: called as ``progress(stage, done, total)``; total 0 where nobody knows it.

    Raises:
        InputError: a wrong argument, model, task or variant; before any long work.
        RunError: a model gives NaN.

    >>> result = robustness(
    ...     "tiny-teacher", "tiny-student", "numerals", n=8, variants=["typos"], noise=[0.5],
    ...     ablation=None,
    ... )
    >>> [condition.name for condition in result.conditions]
    ['clean', 'typos', 'noise 0.5']
    >>> float(result.frame["accuracy"].max())
    1.0
    """
    _check(n, noise, ablation)
    if influences is not None:
        require_same_prompts(influences)
    task = task if isinstance(task, Task) else load_task(task)
    for name in (variant, *(variants or ())):
        task.with_variant(name)
    load = partial(load_with_progress, progress=progress, device=device, dtype=dtype)
    models = load(teacher), load(student)
    sample = partial(task.sample_pair, *models, n, seed, bos=bos)
    clean = sample(variant=variant)
    names = [name for name in task.variants if name != variant] if variants is None else variants
    shifted, notes = _variant_pairs(
        sample, [*dict.fromkeys(names)], progress, required=variants is not None
    )
    config = {
        "teacher": str(models[0].cfg.model_name),
        "student": str(models[1].cfg.model_name),
        "task": task.name,
        "variant": variant,
        "n": n,
        "seed": seed,
        "variants": [*shifted],
        "noise": [float(strength) for strength in noise],
        "ablation": ablation if influences is None else influences["teacher"].ablation,
        "bos": bos,
        "bos_text": {"teacher": clean[0].bos, "student": clean[1].bos},
        "dtype": dtype,
    }
    kept = NO_CHECKPOINT if checkpoint is None else checkpoint
    given: dict[str, dict[str, Tensor]] = {
        side: _behaviour(
            side,
            model,
            clean[number],
            {name: pair[number] for name, pair in shifted.items()},
            noise=noise,
            seed=seed,
            batch_size=batch_size,
            checkpoint=ScopedCheckpoint(kept, f"{side}/behaviour/"),
            progress=progress,
        )
        for number, (side, model) in enumerate(zip(_SIDES, models, strict=True))
    }
    if influences is None and ablation is not None:
        influences = {
            side: node_influence(
                model,
                prompts,
                ablation=ablation,
                batch_size=batch_size,
                checkpoint=ScopedCheckpoint(kept, f"{side}/"),
                progress=progress,
            )
            for side, model, prompts in zip(_SIDES, models, clean, strict=True)
        }
    result = Robustness(
        task=task.name,
        metric=task.metric,
        conditions=(
            CLEAN,
            *(Condition("variant", name) for name in shifted),
            *(Condition.noise(strength) for strength in noise),
        ),
        metrics={side: own["metric"] for side, own in given.items()},
        tops={side: own["top"] for side, own in given.items()} if _one_vocabulary(models) else None,
        influences=None if influences is None else dict(influences),
        parameters={
            side: parameter_count(model) for side, model in zip(_SIDES, models, strict=True)
        },
        warnings=tuple(notes),
        config=config,
        versions=versions(),
    )
    return result.with_warnings(_warnings(result, models, n))


def _check(n: int, noise: Sequence[float], ablation: str | None) -> None:
    if n < MINIMUM_PROMPTS:
        raise InputError(f"n={n} is too few prompts for an interval: take at least 8.")
    if ablation is not None and ablation not in ABLATIONS:
        raise InputError(f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}.")
    if any(not 0 < strength < float("inf") for strength in noise):
        raise InputError(f"Noise must be greater than 0 and finite, not {[*noise]}.")
    if len(set(noise)) < len(noise):
        raise InputError(f"Each strength of noise must be given once, not {[*noise]}.")


def _variant_pairs(
    sample: Callable[..., Pair],
    names: Sequence[str],
    progress: Progress | None,
    *,
    required: bool,
) -> tuple[dict[str, Pair], list[str]]:
    """The prompts of each variant, and why some were left out; required, none is left out."""
    pairs: dict[str, Pair] = {}
    notes = []
    for number, name in enumerate(names):
        try:
            pairs[name] = sample(variant=name)
        except VocabularyError as error:
            if required:
                raise
            notes.append(f"The variant {name} is left out: {error}")
        if progress is not None:
            progress("Drawing prompts", number + 1, len(names))
    return pairs, notes


def _behaviour(
    side: str,
    model: TransformerBridge,
    clean: Prompts,
    shifted: Mapping[str, Prompts],
    *,
    noise: Sequence[float],
    seed: int,
    batch_size: int | None,
    checkpoint: Checkpoint,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """Metric and likeliest token, each [condition, prompt], in the order of ``conditions``."""
    stages = [("clean", clean, (0.0, *noise))]
    stages += [(f"variant.{name}", prompts, (0.0,)) for name, prompts in shifted.items()]
    parts = []
    for number, (name, prompts, strengths) in enumerate(stages):
        part = checkpoint.get(name)
        if part is None:
            found = answers(model, prompts, noise=strengths, seed=seed, batch_size=batch_size)
            part = {"metric": found.metric, "top": found.top}
            checkpoint.put(name, part)
        parts.append(part)
        if progress is not None:
            progress(f"Perturbing the inputs of the {side}", number + 1, len(stages))
    first, *others = parts
    return {
        key: torch.cat([first[key][:1], *(part[key] for part in others), first[key][1:]])
        for key in ("metric", "top")
    }


def _one_vocabulary(models: tuple[TransformerBridge, TransformerBridge]) -> bool:
    """Whether the same number is the same token for both models."""
    teacher, student = (tokenizer_of(model).get_vocab() for model in models)
    return teacher == student


def _warnings(
    result: Robustness, models: tuple[TransformerBridge, TransformerBridge], n: int
) -> list[str]:
    notes = []
    if result.influences is not None:
        notes += competence_warnings(result.influences)
    else:
        notes += result.competence_notes()
    if n < FEW_PROMPTS:
        notes.append(f"Only {n} prompts: the intervals are too narrow; take {FEW_PROMPTS} or more.")
    if models[0].cfg.d_model != models[1].cfg.d_model and result.config["noise"]:
        notes.append(
            "The models differ in width, so each gets its own draw of the noise, of the same "
            "relative size."
        )
    return notes
