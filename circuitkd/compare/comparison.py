"""From two models and a task to a `Comparison`: the whole pipeline, and its result.

Both models read the same prompts. Each one's heads and MLPs are ablated (influence), their outputs
and attention patterns recorded (similarity), and the transport plan between the two influence
profiles gives the alignment and the story: what matches what, what was merged, split and dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel

from circuitkd.circuits.activations import Components, record_components
from circuitkd.circuits.influence import ABLATIONS, node_influence
from circuitkd.circuits.influence_result import Influence, shares
from circuitkd.compare import _report, _storage
from circuitkd.compare._warnings import (
    NO_PAPER,
    UNPROCESSED,
    competence_warnings,
    sample_warnings,
)
from circuitkd.compare.alignment import (
    Alignment,
    argmax_paper_alignment,
    bootstrap_transport,
    transport_alignment,
    with_interval,
)
from circuitkd.compare.matching import (
    Restructuring,
    match,
    matches_frame,
    restructuring,
)
from circuitkd.compare.similarity import component_similarity, paper_similarity, same_kind
from circuitkd.errors import InputError
from circuitkd.metrics import accuracy_interval, bootstrap_weights, percentile_interval
from circuitkd.models import load_model
from circuitkd.prompts import PromptGroup, Prompts, compared_positions
from circuitkd.runs import NO_CHECKPOINT, Checkpoint, ScopedCheckpoint, versions
from circuitkd.tasks import Task, load_task

ModelLike = str | Path | PreTrainedModel | TransformerBridge
Progress = Callable[[str, int, int], None]

PRESETS = ("default", "paper")
MINIMUM_PROMPTS = 8


@dataclass(frozen=True)
class Performance:
    """How well a model does the task, before anything is ablated.

    ``mean``, ``low``, ``high``: the clean metric and its 95 % bootstrap interval over prompts, in
    ``unit``. ``accuracy`` has a Wilson interval, which does not collapse at 100 %. ``competent``:
    whether the metric's interval lies above 0.
    """

    name: str
    metric: str
    unit: str
    mean: float
    low: float
    high: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    competent: bool


@dataclass(frozen=True)
class Comparison:
    """How a student's circuit relates to its teacher's on one task.

    Attributes:
        alignment: the transport alignment with its interval.
        paper_alignment: the published formula; ``None`` where it does not exist (see warnings).
        influences: ``Influence`` of ``"teacher"`` and ``"student"``, prompt by prompt.
        similarity: teacher nodes × student nodes, in [0, 1].
        similarity_low, similarity_high: its 95 % bootstrap interval over prompts, pair by pair;
            ``None`` where nothing was resampled.
        paper_similarity: the same by the paper's measures, or ``None``.
        plan: the transport plan, teacher nodes × student nodes; sums to 1.
        warnings: what a reader of the numbers must know, in words.
        config: the arguments it was made with.
        versions: of circuitkd and what it builds on.
    """

    alignment: Alignment
    paper_alignment: Alignment | None
    influences: Mapping[str, Influence]
    similarity: pd.DataFrame
    similarity_low: pd.DataFrame | None
    similarity_high: pd.DataFrame | None
    paper_similarity: pd.DataFrame | None
    plan: pd.DataFrame
    warnings: tuple[str, ...]
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @cached_property
    def performance(self) -> dict[str, Performance]:
        """Clean metric and accuracy of ``"teacher"`` and ``"student"``."""
        return {side: performance_of(influence) for side, influence in self.influences.items()}

    @cached_property
    def matches(self) -> pd.DataFrame:
        """Matched pairs, most mass first: by transport, or by the paper's rule in preset ``paper``.

        Columns: teacher, student, kind, similarity (with similarity_low and similarity_high where
        it was resampled), mass, teacher_share, student_share. Mass that moves at a similarity below
        the threshold of ``restructuring`` is no match but a loss.
        """
        if self.config["preset"] == "paper" and self.paper_similarity is not None:
            return self.matched("argmax", self.paper_similarity)
        return self.matched("transport")

    def matched(self, method: str, similarity: pd.DataFrame | None = None) -> pd.DataFrame:
        """The pairs of another matching: ``argmax``, ``one-to-one`` or ``transport``."""
        values = (self.similarity if similarity is None else similarity).to_numpy()
        p, q = (self.influences[side].share() for side in ("teacher", "student"))
        left, right = (self.influences[side].nodes for side in ("teacher", "student"))
        kinds = np.array([[a.kind == b.kind for b in right] for a in left])
        plan = self.plan.to_numpy()
        if method != "transport" or similarity is not None:
            plan = match(p, q, values, method, kinds)
        frame = matches_frame(plan, values, p, q, left, right)
        if similarity is None and self.similarity_low is not None:
            for end in ("low", "high"):
                table: pd.DataFrame = getattr(self, f"similarity_{end}")
                pairs = zip(frame.teacher, frame.student, strict=True)
                frame[f"similarity_{end}"] = [float(table.loc[pair]) for pair in pairs]
        return frame

    @cached_property
    def restructuring(self) -> Restructuring:
        """Merges, splits and drops at the default thresholds; ``restructured`` takes others."""
        return self.restructured()

    def restructured(
        self, *, threshold: float = 0.25, part: float = 0.1, least: float = 0.01
    ) -> Restructuring:
        """Merges, splits and drops of the transport plan (see `matching.restructuring`)."""
        return restructuring(
            self.plan.to_numpy(),
            self.similarity.to_numpy(),
            self.influences["teacher"].nodes,
            self.influences["student"].nodes,
            threshold=threshold,
            part=part,
            least=least,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``: what ``circuitkd score --json`` prints."""
        return _report.as_plain_data(self)

    def save(self, directory: str | Path) -> None:
        """Write comparison.safetensors and comparison.json; each appears whole or not at all."""
        _storage.save(self, Path(directory))

    def __repr__(self) -> str:
        return _report.as_text(self)


def load_comparison(directory: str | Path) -> Comparison:
    """Read what `Comparison.save` wrote; raises ``InputError`` where there is none."""
    return Comparison(**_storage.load_fields(Path(directory)))


def compare(
    teacher: ModelLike,
    student: ModelLike,
    task: str | Path | Task,
    *,
    n: int = 100,
    seed: int = 0,
    ablation: str = "mean",
    preset: str = "default",
    bos: str = "auto",
    variant: str | None = None,
    batch_size: int | None = None,
    draws: int = 1000,
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
        bos: ``auto``, ``none`` or a token (see ``Task.sample``).
        variant: an out-of-distribution variant of the task.
        batch_size: prompts that go through a model at once.
        draws: bootstrap samples behind the interval; 0 for none.
        device: where models given by name run.
        dtype: of the weights of models given by name.
        checkpoint: keeps finished parts, so that an interrupted comparison goes on.
        progress: called as ``progress(stage, done, total)``; total 0 where nobody knows it.

    Raises:
        InputError: a wrong argument, model, or task; before any long work.

    >>> import circuitkd as ckd
    >>> result = ckd.compare("tiny-teacher", "tiny-teacher", "numerals", n=8, draws=0)
    >>> round(result.alignment.value, 6)
    1.0
    """
    _check(n, ablation, preset, draws)
    task = task if isinstance(task, Task) else load_task(task)
    processed = preset == "paper"
    load = partial(_load, progress=progress, device=device, dtype=dtype, processed=processed)
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
        "bos": bos,
        "bos_text": {"teacher": pair[0].bos, "student": pair[1].bos},
        "processed": processed,
        "dtype": dtype,
        "draws": draws,
    }
    kept = NO_CHECKPOINT if checkpoint is None else checkpoint
    influences = {
        side: node_influence(
            model,
            prompts,
            ablation=ablation,
            batch_size=batch_size,
            checkpoint=ScopedCheckpoint(kept, f"{side}/"),
            progress=progress,
        )
        for side, model, prompts in zip(("teacher", "student"), models, pair, strict=True)
    }
    places = [compared_positions(*groups) for groups in _group_pairs(pair)]
    config["positions"] = _coverage(pair, places)
    recorded = [
        record_components(
            model,
            prompts,
            [group[side] for group in places],
            batch_size=batch_size,
            progress=progress,
        )
        for side, (model, prompts) in enumerate(zip(models, pair, strict=True))
    ]
    loaded = [isinstance(model, TransformerBridge) for model in (teacher, student)]
    notes = [UNPROCESSED] if processed and any(loaded) else []
    return compare_recorded(
        influences, (recorded[0], recorded[1]), config, notes, progress=progress
    )


def compare_recorded(
    influences: Mapping[str, Influence],
    components: tuple[Components, Components],
    config: Mapping[str, Any],
    warnings: Sequence[str] = (),
    *,
    progress: Progress | None = None,
) -> Comparison:
    """The comparison of two models whose influences and components have been measured.

    ``config`` needs ``seed``, ``draws``, ``preset`` and ``positions`` (``all`` or ``labelled``);
    the rest of it is kept as it is.
    """
    effects = [influences[side].effects.double().numpy() for side in ("teacher", "student")]
    weights = _weights(len(effects[0]), config["draws"], config["seed"])
    similarity = component_similarity(*components, weights, progress=progress)
    p, q = (shares(effect.mean(0)) for effect in effects)
    value, plan = transport_alignment(p, q, similarity.value)
    drawn_p, drawn_q = (shares(weights @ effect) for effect in effects)
    drawn = bootstrap_transport(drawn_p, drawn_q, similarity.draws, progress=progress)
    paper = _paper(components, p, q, drawn_p, drawn_q)
    notes = [
        *competence_warnings(influences),
        *sample_warnings(len(effects[0]), config),
        *([] if paper else [NO_PAPER]),
        *warnings,
    ]
    rows, columns = ([n.name for n in influences[side].nodes] for side in ("teacher", "student"))
    ends = percentile_interval(similarity.draws) if len(similarity.draws) else (None, None)
    low, high = (
        None if end is None else pd.DataFrame(end, index=rows, columns=columns) for end in ends
    )
    return Comparison(
        alignment=with_interval(value, drawn, "transport"),
        paper_alignment=paper[0] if paper else None,
        influences=dict(influences),
        similarity=pd.DataFrame(similarity.value, index=rows, columns=columns),
        similarity_low=low,
        similarity_high=high,
        paper_similarity=pd.DataFrame(paper[1], index=rows, columns=columns) if paper else None,
        plan=pd.DataFrame(plan, index=rows, columns=columns),
        warnings=tuple(notes),
        config=dict(config),
        versions=versions(),
    )


def performance_of(influence: Influence) -> Performance:
    """The clean performance that an influence was measured against."""
    clean = influence.clean.double().numpy()
    low, high = influence.clean_interval
    accuracy_low, accuracy_high = accuracy_interval(influence.clean)
    return Performance(
        name=influence.model,
        metric=influence.metric,
        unit=influence.unit,
        mean=float(clean.mean()),
        low=low,
        high=high,
        accuracy=influence.accuracy,
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        competent=influence.competent,
    )


def _check(n: int, ablation: str, preset: str, draws: int) -> None:
    if n < MINIMUM_PROMPTS:
        raise InputError(f"n={n} is too few prompts to compare circuits: take at least 8.")
    if ablation not in ABLATIONS:
        raise InputError(f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}.")
    if preset not in PRESETS:
        raise InputError(f"Unknown preset {preset!r}: choose one of {', '.join(PRESETS)}.")
    if draws < 0:
        raise InputError(f"draws={draws}: the number of bootstrap draws cannot be negative.")


def _load(model: ModelLike, progress: Progress | None, **options: Any) -> TransformerBridge:
    """`load_model` with a sign of life, for what is read from a disk or a network."""
    if progress is None or not isinstance(model, str | Path):
        return load_model(model, **options)
    progress(f"Loading {model}", 0, 0)
    loaded = load_model(model, **options)
    progress(f"Loading {model}", 1, 1)
    return loaded


def _group_pairs(pair: tuple[Prompts, Prompts]) -> list[tuple[PromptGroup, PromptGroup]]:
    return list(zip(pair[0].groups, pair[1].groups, strict=True))


def _coverage(pair: tuple[Prompts, Prompts], places: list[tuple[Tensor, Tensor]]) -> str:
    """Whether the compared positions are ``all``, or only the ``labelled`` ones of some group."""
    lengths = [min(a.clean.shape[1], b.clean.shape[1]) for a, b in _group_pairs(pair)]
    whole = [here.shape[1] == n for (here, _), n in zip(places, lengths, strict=True)]
    return "all" if all(whole) else "labelled"


def _weights(n: int, draws: int, seed: int) -> Int[np.ndarray, "draw prompt"]:
    return bootstrap_weights(n, draws, seed) if draws else np.zeros((0, n), dtype=np.int64)


def _paper(
    components: tuple[Components, Components],
    p: Float[np.ndarray, "teacher"],
    q: Float[np.ndarray, "student"],
    drawn_p: Float[np.ndarray, "draw teacher"],
    drawn_q: Float[np.ndarray, "draw student"],
) -> tuple[Alignment, Float[np.ndarray, "teacher student"]] | None:
    """The paper's alignment and similarities; ``None`` for models of different widths.

    Its interval resamples influences only: the paper's similarities are taken as they are.
    """
    left, right = components
    if left.raw_mlp[0].shape[1] != right.raw_mlp[0].shape[1]:
        return None
    values, kinds = paper_similarity(left, right), same_kind(left, right)
    usable = (drawn_p.max(1, initial=0) > 0) & (drawn_q.max(1, initial=0) > 0)
    drawn = [
        argmax_paper_alignment(*pair, values, kinds)
        for pair in zip(drawn_p[usable], drawn_q[usable], strict=True)
    ]
    value = argmax_paper_alignment(p, q, values, kinds)
    return with_interval(value, np.array(drawn), "paper"), values
