"""What MLPs write and what the residual stream holds, seen through principal components.

Both models read the same prompts; activations are taken at the labelled positions. Each site (an
MLP's output, or the stream after a block) gets its own PCA, so widths may differ. A student's
scores become comparable with a teacher's by the rotation and scale that fit best (Procrustes).
Depths may differ too: layers are paired by the caller, or by relative depth.

Much of what two models share at labelled positions is which label it is. Every figure therefore
comes with its ``chance``: the same computed with the student's prompts shuffled, each label still
matched with its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.circuits.influence import observe_in_slices
from circuitkd.compare._pca import principal_components, shuffles
from circuitkd.compare._pca_frames import (
    SitePair,
    cosine_frame,
    projection_frame,
    variance_frame,
    with_chance,
)
from circuitkd.errors import InputError
from circuitkd.models import model_label
from circuitkd.prompts import PromptGroup, Prompts

SiteKind = Literal["mlp", "residual"]
SITES: tuple[SiteKind, ...] = ("mlp", "residual")
LayerPairs = Sequence[tuple[int, int]]

_SHUFFLES = 20
_MINIMUM_PROMPTS = 4
_TEXTS = "residual_pca.json"


@dataclass(frozen=True, eq=False)
class SiteActivations:
    """One model's activations at the labelled positions, prompts in sampling order.

    ``mlp[l]`` is what MLP l writes, ``residual[l]`` the stream after block l; both as they are.
    """

    model: str
    labels: tuple[str, ...]
    mlp: tuple[Float[Tensor, "prompt label d_model"], ...]
    residual: tuple[Float[Tensor, "prompt label d_model"], ...]


@dataclass(frozen=True, eq=False)
class ResidualPCA:
    """Two models' principal components side by side. All tables are in long form, for figures.

    Attributes:
        about: teacher, student, task, labels, components, variance, seed.
        variance: side, site, layer, component, ratio, cumulative: explained variance of each
            model's own PCA.
        projections: site, teacher_layer, student_layer, side, prompt, label, pc1, pc2, ...: scores
            of both models in the teacher's components; the student's are rotated and scaled.
        pairs: site, teacher_layer, student_layer, residual (of Procrustes, 0 alike, 1 unrelated),
            scale, cosine, cca_mean, cca_max, svcca; each but scale with its ``_chance``.
        cosines: site, teacher_layer, student_layer, label, cosine, low, high, chance: how alike the
            rows of one label are after alignment on other prompts, with a 95 % bootstrap interval
            over prompts.
    """

    about: dict[str, Any]
    variance: pd.DataFrame
    projections: pd.DataFrame
    pairs: pd.DataFrame
    cosines: pd.DataFrame

    def save(self, directory: str | Path) -> None:
        """Write ``residual_pca.json`` and a CSV file for each table."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in _tables():
            getattr(self, name).to_csv(directory / f"{name}.csv", index=False)
        (directory / _TEXTS).write_text(json.dumps(self.about, indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> "ResidualPCA":
        """Read what ``save`` wrote."""
        directory = Path(directory)
        if not (directory / _TEXTS).is_file():
            raise InputError(f"There is no saved residual PCA in {str(directory)!r}.")
        tables = {name: pd.read_csv(directory / f"{name}.csv") for name in _tables()}
        return cls(about=json.loads((directory / _TEXTS).read_text()), **tables)

    def __repr__(self) -> str:
        about = self.about
        lines = [
            f"Principal components of {about['teacher']} and {about['student']} on "
            f"{about['task']} at {', '.join(about['labels'])}; first {about['components']}.",
            "Cosine after alignment on other prompts (with shuffled prompts), SVCCA (shuffled):",
        ]
        for row in self.pairs.to_dict("records"):
            lines.append(
                f"  {row['site']:<8} T {row['teacher_layer']} S {row['student_layer']}   "
                f"{row['cosine']:.2f} ({row['cosine_chance']:.2f})   "
                f"{row['svcca']:.2f} ({row['svcca_chance']:.2f})"
            )
        return "\n".join(lines)


@torch.no_grad()
def record_sites(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    labels: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> SiteActivations:
    """Run the clean prompts once and keep MLP outputs and residual stream at the labels.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample_pair`` with this model.
        labels: by default all that every prompt has.
        batch_size: prompts that go through the model at once.

    Raises:
        InputError: a label that some prompt lacks, or no label at all.
    """
    kept = _labels(prompts, labels)
    shape = (len(prompts), len(kept), model.cfg.d_model)
    n_layers = model.cfg.n_layers
    mlp = tuple(torch.zeros(shape) for _ in range(n_layers))
    residual = tuple(torch.zeros(shape) for _ in range(n_layers))
    for group in prompts.groups:
        replay = Replay(model, group.clean, group.answer)
        rows = rows_per_batch(model, group.clean.shape[1], batch_size)
        stream = replay.embed(group.clean)
        for layer in range(n_layers):
            seen = observe_in_slices(replay, layer, stream, rows)
            stream = seen.post
            mlp[layer][group.index] = _at_labels(seen.mlp, group, kept)
            residual[layer][group.index] = _at_labels(stream, group, kept)
    return SiteActivations(model_label(model), kept, mlp, residual)


def residual_pca(
    teacher: TransformerBridge,
    student: TransformerBridge,
    teacher_prompts: Prompts,
    student_prompts: Prompts,
    *,
    components: int = 10,
    pairs: LayerPairs | str = "depth",
    labels: Sequence[str] | None = None,
    variance: float = 0.99,
    seed: int = 0,
    batch_size: int | None = None,
) -> ResidualPCA:
    """Compare MLP outputs and residual streams of two models through their principal components.

    Args:
        teacher: from ``load_model``.
        student: likewise; any width and depth.
        teacher_prompts: from ``task.sample_pair``.
        student_prompts: the same prompts for the student.
        components: how many principal components are aligned and shown; fewer where a site has
            fewer that vary.
        pairs: (teacher layer, student layer) to compare; ``"all"``; or ``"depth"``: student layer s
            of S with teacher layer round((s + 1) T / S) - 1 of T, so last meets last.
        labels: positions to look at; by default all that every prompt has.
        variance: SVCCA keeps the components that hold this share of each model's variance.
        seed: of the shuffles behind the ``chance`` columns.
        batch_size: prompts that go through a model at once.

    Sources: SVCCA, the mean canonical correlation of leading components (Raghu et al. 2017);
    Procrustes with scale (Schönemann 1966; Ding et al. 2021).

    Raises:
        InputError: different prompts, fewer than 4, unknown layers or labels, or numbers out of
            range.

    >>> import circuitkd as ckd
    >>> models = ckd.load_model("tiny-teacher"), ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample_pair(*models, n=12)
    >>> found = residual_pca(*models, *prompts, components=2)
    >>> found.pairs[["site", "teacher_layer", "student_layer"]].values.tolist()
    [['mlp', 1, 0], ['mlp', 3, 1], ['residual', 1, 0], ['residual', 3, 1]]
    """
    _check(teacher_prompts, student_prompts, components, variance)
    chosen = _layer_pairs(pairs, teacher.cfg.n_layers, student.cfg.n_layers)
    sides = {
        "teacher": record_sites(teacher, teacher_prompts, labels=labels, batch_size=batch_size),
        "student": record_sites(student, student_prompts, labels=labels, batch_size=batch_size),
    }
    kept = sides["teacher"].labels
    orders = shuffles(len(teacher_prompts), _SHUFFLES, seed)
    fitted = {
        (side, site): [principal_components(x.double().numpy()) for x in getattr(recorded, site)]
        for side, recorded in sides.items()
        for site in SITES
    }
    rows: list[dict[str, Any]] = []
    cosines, projections = [], []
    for site in SITES:
        for t, s in chosen:
            ours, theirs = fitted["teacher", site][t], fitted["student", site][s]
            where = {"site": site, "teacher_layer": t, "student_layer": s}
            each = SitePair(ours, theirs, components, variance)
            chance = [SitePair(ours, theirs, components, variance, order) for order in orders]
            rows.append({**where, **with_chance(each, chance)})
            cosines.append(cosine_frame(where, kept, each, chance))
            projections.append(projection_frame(where, kept, each))
    return ResidualPCA(
        about={
            "teacher": model_label(teacher),
            "student": model_label(student),
            "task": teacher_prompts.task,
            "labels": list(kept),
            "components": components,
            "variance": variance,
            "seed": seed,
        },
        variance=variance_frame(fitted, components),
        projections=pd.concat(projections, ignore_index=True),
        pairs=pd.DataFrame(rows),
        cosines=pd.concat(cosines, ignore_index=True),
    )


def layer_pairs_by_depth(teacher_layers: int, student_layers: int) -> list[tuple[int, int]]:
    """Each student layer with the teacher layer that ends at the same relative depth.

    >>> layer_pairs_by_depth(12, 6)
    [(1, 0), (3, 1), (5, 2), (7, 3), (9, 4), (11, 5)]
    """
    ratio = teacher_layers / student_layers
    return [(max(0, int((s + 1) * ratio + 0.5) - 1), s) for s in range(student_layers)]


def _labels(prompts: Prompts, labels: Sequence[str] | None) -> tuple[str, ...]:
    shared = set.intersection(*(set(group.positions) for group in prompts.groups))
    wanted = [label for label in prompts.groups[0].positions if label in shared]
    if labels is not None:
        if missing := set(labels) - shared:
            raise InputError(f"Not all prompts have the labels {', '.join(sorted(missing))}.")
        wanted = list(labels)
    if not wanted:
        raise InputError("There is no label that all prompts have, so nowhere to look.")
    return tuple(wanted)


def _at_labels(
    stream: Float[Tensor, "batch pos d_model"], group: PromptGroup, labels: tuple[str, ...]
) -> Float[Tensor, "batch label d_model"]:
    places = torch.stack([group.positions[label] for label in labels], 1)
    return stream.float().cpu().take_along_dim(places[..., None], dim=1)


def _layer_pairs(pairs: LayerPairs | str, teacher: int, student: int) -> list[tuple[int, int]]:
    if pairs == "depth":
        return layer_pairs_by_depth(teacher, student)
    if pairs == "all":
        return [(t, s) for t in range(teacher) for s in range(student)]
    if isinstance(pairs, str) or not pairs:
        raise InputError("Pair layers by 'depth', 'all', or a list of (teacher, student) layers.")
    for t, s in pairs:
        if not (0 <= t < teacher and 0 <= s < student):
            raise InputError(
                f"There is no pair of layers ({t}, {s}): the teacher has {teacher}, the student "
                f"{student}."
            )
    return list(pairs)


def _check(teacher: Prompts, student: Prompts, components: int, variance: float) -> None:
    if len(teacher) < _MINIMUM_PROMPTS:
        raise InputError(f"Alignment is fitted on half of the prompts: {_MINIMUM_PROMPTS} or more.")
    if teacher.texts != student.texts:
        raise InputError("The models read different prompts: take both from one sample_pair.")
    if components < 1 or not 0 < variance <= 1:
        raise InputError(
            f"components={components} must be at least 1 and variance={variance} in (0, 1]."
        )


def _tables() -> list[str]:
    return [field.name for field in fields(ResidualPCA) if field.name != "about"]
