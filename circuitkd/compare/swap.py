"""The causal check of a match: the student's component does the teacher's work, or it does not.

A similarity says that two components look alike. `swap_test` puts the one in the other's place.

1. *Fit.* On one half of the prompts, both components' outputs are taken at the compared positions,
   centred by their mean-ablation value, as rows X (student) and Y (teacher) of what they write to
   the residual stream. The best orthogonal map with a scale (Procrustes, Schönemann 1966) is
   R = U Vᵀ from the singular value decomposition XᵀY = U Σ Vᵀ and c = tr Σ / ‖XR‖², which minimise
   ‖Y − c X R‖. Widths may differ: R is then a partial isometry. Directions that the fitting prompts
   never used are not mapped (singular values below 1e-9 of the largest).
2. *Swap.* On the other half, the teacher runs with its component writing its mean-ablation value
   plus c x R, x being the centred output of the student's component on the same prompt, at the
   compared positions. At all other positions it writes its mean-ablation value.
3. *Measure.* survived = (swapped − ablated) / (clean − ablated), metrics of the teacher: 1 where
   the student's component does all that the teacher's does for the task, 0 where it does no more
   than the mean ablation, negative where it does harm.
4. *Compare.* The same with other components of the student of the same kind, drawn at random, each
   with a map of its own: a map has freedom enough to make something of any component.

A match is ``verified`` if its component does better than the mean ablation and better than at least
nine in ten of the random ones, each time by a 95 % bootstrap interval over prompts that lies above
0. (Not all of them: a student that split a component into twins has a second right answer.) Where
the student has no other component of the kind, or ablating the teacher's component moves the metric
by less than its interval, nothing can be verified. Matches are not corrected for their number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.activations import Components, gram_root, record_components
from circuitkd.circuits.engine import Observed, Replay, rows_per_batch
from circuitkd.circuits.influence import Progress, observe_in_slices
from circuitkd.circuits.readout import metric_readout
from circuitkd.compare._swap_result import SwapTest
from circuitkd.errors import InputError, RunError
from circuitkd.models import component_nodes_of, model_label
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts, compared_positions

if TYPE_CHECKING:
    from circuitkd.compare.comparison import Comparison

__all__ = ["SwapTest", "best_map", "strongest_matches", "swap_test"]

Match = tuple[Node, Node]

MINIMUM_PROMPTS = 8
_NOTHING = 1e-9  # singular values below this part of the largest are rounding


def swap_test(
    teacher: TransformerBridge,
    student: TransformerBridge,
    prompts: tuple[Prompts, Prompts],
    matches: "Comparison | Iterable[tuple[Node | str, Node | str]]",
    *,
    controls: int = 10,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> SwapTest:
    """Put student components in the place of the teacher components that they are matched with.

    Args:
        teacher: from ``load_model``.
        student: likewise.
        prompts: from ``task.sample_pair`` with these two. The first half of the sampling order fits
            the maps, the second half is measured on. To map MLPs the first half should have more
            rows (prompts × positions) than the models are wide.
        matches: (teacher's, student's) nodes of one kind each; or a ``Comparison``, for its
            strongest ones (see ``strongest_matches``).
        controls: random components of the student to compare each match with; as many as there are
            where these are fewer.
        seed: of the choice of random components.
        batch_size: prompts that go through a model at once.
        progress: called as ``progress(stage, done, total)``.

    Returns:
        ``SwapTest``, one row a match, in the order given.

    Raises:
        InputError: no matches, unknown nodes, nodes of two kinds, too few prompts, prompts that are
            not a pair.
        RunError: the teacher gives NaN.

    Source: cross-model patching with a fitted map, in the spirit of Ranawat 2024 (GPT-2 and
    DistilGPT2) and of model stitching (Bansal et al. 2021); the null of random components is ours.

    >>> import circuitkd as ckd
    >>> teacher = ckd.load_model("tiny-teacher")
    >>> both = ckd.load_task("weekdays").sample_pair(teacher, teacher, n=16, seed=0)
    >>> round(float(swap_test(teacher, teacher, both, [("m0", "m0")]).frame["survived"][0]), 3)
    1.0
    """
    pairs = _checked(matches, teacher, student, prompts, controls)
    fit, held = _halves(prompts)
    places = [compared_positions(*groups) for groups in _groups(fit)]
    recorded = [
        record_components(
            model, side, [own[number] for own in places], batch_size=batch_size, progress=progress
        )
        for number, (model, side) in enumerate(zip((teacher, student), fit, strict=True))
    ]
    there = [compared_positions(*groups) for groups in _groups(held)]
    inputs = record_components(
        student, held[1], [own[1] for own in there], batch_size=batch_size, progress=progress
    )
    rivals = [_rivals(theirs, student, controls, seed, k) for k, (_, theirs) in enumerate(pairs)]
    swaps = [
        _swap(teacher, ours, (theirs, *others), recorded[0], recorded[1], inputs)
        for (ours, theirs), others in zip(pairs, rivals, strict=True)
    ]
    metrics = _run(teacher, held[0], swaps, [own[0] for own in there], batch_size, progress)
    if not all(bool(torch.isfinite(values).all()) for values in metrics.values()):
        raise RunError(f"{model_label(teacher)} gave NaN or infinite metrics; try dtype float32.")
    return SwapTest(
        teacher=model_label(teacher),
        student=model_label(student),
        task=held[0].task,
        metric=held[0].metric,
        matches=tuple(pairs),
        controls=tuple(rivals),
        explained=tuple(swap.explained for swap in swaps),
        clean=metrics["clean"],
        ablated=metrics["ablated"],
        swapped=tuple(metrics[f"swapped {number}"] for number in range(len(swaps))),
    )


def strongest_matches(comparison: "Comparison", top: int = 10) -> list[Match]:
    """The matches that carry the most influence in a comparison, strongest first.

    Pairs that are no more alike than chance are losses, not matches.
    """
    matches = comparison.matches
    alike = matches.loc[matches["similarity"] >= comparison.restructuring.threshold]
    return pairs_of(alike, top)


def pairs_of(matches: pd.DataFrame, top: int) -> list[Match]:
    """The first pairs of one kind in a table of matches."""
    pairs = [
        (Node.parse(ours), Node.parse(theirs))
        for ours, theirs in zip(matches["teacher"], matches["student"], strict=True)
    ]
    return [pair for pair in pairs if pair[0].kind == pair[1].kind][:top]


@dataclass(frozen=True)
class Map:
    """``scale`` · x ``rotation`` maps rows x; ``explained`` is the share of ‖Y‖² it accounts for
    where it was fitted.
    """

    rotation: Float[Tensor, "source target"]
    scale: float
    explained: float

    def __call__(self, rows: Float[Tensor, "row source"]) -> Float[Tensor, "row target"]:
        return (self.scale * rows.double() @ self.rotation).float()


def best_map(source: Float[Tensor, "row source"], target: Float[Tensor, "row target"]) -> Map:
    """The orthogonal map with a scale that takes ``source`` closest to ``target``.

    Minimises ‖target − c · source R‖ over c ≥ 0 and isometries R between the directions that the
    rows use (for different widths as if the narrower one had zeros for its missing entries). A
    source or target of zeros gives the zero map.

    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> turned = 2 * x @ torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]])
    >>> found = best_map(x, turned)
    >>> round(found.scale, 4), round(found.explained, 4), torch.allclose(found(x), turned)
    (2.0, 1.0, True)
    """
    x, y = source.double(), target.double()
    left, values, right = torch.linalg.svd(x.mT @ y, full_matrices=False)
    used = values > _NOTHING * values[:1]
    rotation = left[:, used] @ right[used]
    size, own = (x @ rotation).square().sum(), y.square().sum()
    if not bool(used.any()) or not size > 0:
        return Map(torch.zeros_like(x.mT @ y), 0.0, 0.0)
    matched = values[used].sum()
    return Map(rotation, float(matched / size), float(matched**2 / (size * own)))


@dataclass(frozen=True)
class _Swap:
    """What is written instead of a teacher component's own centred output, for each candidate."""

    node: Node
    basis: Float[Tensor, "feature d_model"] | None  # from features to the stream; None: the same
    rows: tuple[Float[Tensor, "row feature"], ...]
    explained: float


def _swap(
    teacher: TransformerBridge,
    ours: Node,
    candidates: Sequence[Node],
    fit_teacher: Components,
    fit_student: Components,
    inputs: Components,
) -> _Swap:
    target = fit_teacher.features[fit_teacher.nodes.index(ours)]
    places = [inputs.nodes.index(theirs) for theirs in candidates]
    maps = [best_map(fit_student.features[place], target) for place in places]
    rows = [found(inputs.features[place]) for found, place in zip(maps, places, strict=True)]
    return _Swap(ours, _basis(teacher, ours), tuple(rows), maps[0].explained)


def _basis(model: TransformerBridge, node: Node) -> Float[Tensor, "feature d_model"] | None:
    """What each feature of a recorded component is in the residual stream.

    A head's features are its z times the root G of W_O W_Oᵀ, so that features · G⁻¹ W_O is its
    write, and inner products are the same in both.
    """
    if node.head is None:
        return None
    W_O = model.blocks[node.layer].attn.W_O.detach()[node.head].cpu()
    root = gram_root(W_O[None])[0].double()
    return (torch.linalg.pinv(root, rtol=1e-6) @ W_O.double()).float()


def _run(
    teacher: TransformerBridge,
    prompts: Prompts,
    swaps: Sequence[_Swap],
    places: Sequence[Int[Tensor, "_ _"]],
    batch_size: int | None,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """The teacher's metric, clean [prompt], with each node ablated and with each swap [_, prompt].

    Rows of recorded features are ordered by group, prompt, position, as they were recorded.
    """
    n = len(prompts)
    metrics = {"clean": torch.zeros(n), "ablated": torch.zeros(len(swaps), n)}
    metrics |= {f"swapped {k}": torch.zeros(len(swap.rows), n) for k, swap in enumerate(swaps)}
    first = 0
    for number, (group, own) in enumerate(zip(prompts.groups, places, strict=True)):
        rows = slice(first, first + own.numel())
        first = rows.stop
        run = _GroupRun(teacher, group, prompts.metric, own, batch_size)
        for layer in range(teacher.cfg.n_layers):
            run.advance(layer)
            for k, swap in enumerate(swaps):
                if swap.node.layer != layer:
                    continue
                written = run.measure(swap, rows)
                metrics["ablated"][k, group.index] = written[0]
                metrics[f"swapped {k}"][:, group.index] = written[1:]
        metrics["clean"][group.index] = run.clean_metric()
        if progress is not None:
            progress(f"Swapping into {model_label(teacher)}", number + 1, len(prompts.groups))
    return metrics


class _GroupRun:
    """The teacher's clean stream of one group, and the one that gives mean-ablation values."""

    def __init__(
        self,
        model: TransformerBridge,
        group: PromptGroup,
        metric: str,
        places: Int[Tensor, "batch compared"],
        batch_size: int | None,
    ) -> None:
        self.replay = Replay(model, group.clean, group.answer)
        self.read = metric_readout(self.replay, group, metric)
        self.rows = rows_per_batch(model, group.clean.shape[1], batch_size)
        self.places = places.to(self.replay.device)
        self.clean = self.replay.embed(group.clean)
        self.means = self.replay.embed(group.means)
        self.seen: Observed
        self.mean: Observed
        self.layer = -1

    def advance(self, layer: int) -> None:
        """Run both streams through a layer."""
        self.layer = layer
        self.seen = observe_in_slices(self.replay, layer, self.clean, self.rows)
        self.mean = observe_in_slices(self.replay, layer, self.means, self.rows)
        self.clean, self.means = self.seen.post, self.mean.post

    def clean_metric(self) -> Float[Tensor, "batch"]:
        """The metric of the clean stream, once it is behind the last layer."""
        slices = self._slices()
        return torch.cat(
            [self.read(self.clean[rows, self.replay.answer][None], rows)[0] for rows in slices]
        )

    def measure(self, swap: _Swap, rows: slice) -> Float[Tensor, "candidate batch"]:
        """The metric with the node ablated, then with each candidate in its place."""
        written, mean = self._writes(swap.node)
        found = [self._metric(swap.node, (mean - written).expand_as(written))]
        for own in swap.rows:
            change = own[rows].to(written)
            if swap.basis is not None:
                change = change @ swap.basis.to(written)
            change = change.unflatten(0, self.places.shape)
            there = torch.zeros_like(written)
            there.scatter_(1, self.places[..., None].expand_as(change), change)
            found.append(self._metric(swap.node, mean + there - written))
        return torch.stack(found)

    def _writes(self, node: Node) -> tuple[Tensor, Tensor]:
        """What the node adds to the stream, [batch, pos, d_model], and its mean-ablation value."""
        if node.head is None:
            mean = self.mean.mlp.float().mean(0, keepdim=True)
            return self.seen.mlp, mean.to(self.seen.mlp)
        W_O = self.replay.W_O(self.layer)[node.head]
        mean = self.mean.z[:, :, node.head].float().mean(0, keepdim=True)
        return self.seen.z[:, :, node.head] @ W_O, mean.to(W_O) @ W_O

    def _metric(self, node: Node, change: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch"]:
        """The metric with ``change`` added to what the node writes."""
        found = []
        for rows in self._slices():
            if node.head is None:
                mid, written = self.seen.mid[rows], self.seen.mlp[rows] + change[rows]
                post = self.replay.after_mlp(self.layer, mid, written)
                end = self.replay.end_after_block(self.layer, post)
            else:
                seen = self.seen.of(rows)
                end = self.replay.end_after_attention(self.layer, seen, change[rows])
            found.append(self.read(end[None], rows)[0])
        return torch.cat(found)

    def _slices(self) -> list[slice]:
        n = len(self.clean)
        return [slice(k, min(k + self.rows, n)) for k in range(0, n, self.rows)]


def _checked(
    matches: "Comparison | Iterable[tuple[Node | str, Node | str]]",
    teacher: TransformerBridge,
    student: TransformerBridge,
    prompts: tuple[Prompts, Prompts],
    controls: int,
) -> list[Match]:
    if not isinstance(matches, Iterable):
        matches = strongest_matches(matches)
    pairs = [tuple(n if isinstance(n, Node) else Node.parse(n) for n in pair) for pair in matches]
    if not pairs:
        raise InputError("There are no matches to test.")
    if controls < 0:
        raise InputError(f"controls={controls}: there cannot be fewer than none.")
    if len(prompts[0]) < MINIMUM_PROMPTS or len(prompts[0]) != len(prompts[1]):
        raise InputError(
            f"A swap test needs the same {MINIMUM_PROMPTS} prompts or more for both models, from "
            f"one sample_pair; these are {len(prompts[0])} and {len(prompts[1])}."
        )
    for ours, theirs in pairs:
        for node, model in ((ours, teacher), (theirs, student)):
            if node not in component_nodes_of(model):
                raise InputError(f"{model_label(model)} has no head or MLP {node}.")
        if ours.kind != theirs.kind:
            raise InputError(f"{ours} and {theirs} are a head and an MLP: swap one kind only.")
    return [(ours, theirs) for ours, theirs in pairs]


def _halves(prompts: tuple[Prompts, Prompts]) -> tuple[tuple[Prompts, Prompts], ...]:
    """The first half of the prompts, to fit on, and the second, to measure on."""
    n = len(prompts[0])
    cut = (range(n // 2), range(n // 2, n))
    return tuple((prompts[0].take(part), prompts[1].take(part)) for part in cut)


def _groups(pair: tuple[Prompts, Prompts]) -> list[tuple[PromptGroup, PromptGroup]]:
    return list(zip(pair[0].groups, pair[1].groups, strict=True))


def _rivals(
    theirs: Node, student: TransformerBridge, controls: int, seed: int, number: int
) -> tuple[Node, ...]:
    """Other components of the student of the same kind, drawn at random."""
    others = [n for n in component_nodes_of(student) if n.kind == theirs.kind and n != theirs]
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
    picked = rng.permutation(len(others))[:controls]
    return tuple(others[place] for place in picked)
