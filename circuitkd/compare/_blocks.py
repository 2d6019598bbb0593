"""Similarities of all heads, or of all MLPs, of two models: one function a way of comparing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from jaxtyping import Float, Int, Real
from torch import Tensor

from circuitkd.circuits.activations import Components
from circuitkd.compare._measures_output import (
    OutputMeasure,
    Rows,
    principal_angles,
    procrustes,
    svcca,
)
from circuitkd.compare._measures_paper import mean_direction_cosine, rescaled, top_directions
from circuitkd.compare._outputs import output_similarity
from circuitkd.compare._patterns import (
    circuit_correlations,
    js_similarity,
    paper_head_similarity,
    pattern_similarity,
)
from circuitkd.errors import InputError
from circuitkd.nodes import NodeKind

_SHUFFLES = 4
"""Shuffles of the student's prompts behind a chance level."""
_NO_ROOM = 1e-6
"""Where chance leaves less room than this below 1, a similarity says nothing."""

Table = Float[np.ndarray, "teacher student"]
Draws = Float[np.ndarray, "draw teacher student"]
Circuits = tuple[Float[Tensor, "_ _ _"], Float[Tensor, "_ _ _"]]


@dataclass(frozen=True)
class Pair:
    """Two models' recordings, what kind of component to compare, and how."""

    teacher: Components
    student: Components
    kind: NodeKind
    weights: Real[np.ndarray, "draw prompt"]
    corrected: bool
    circuits: Circuits | None
    progress: Callable[[int, int], None] | None

    def features(self) -> tuple[list[Tensor], list[Tensor]]:
        left, right = (
            [side.features[place] for place in places(side, self.kind)]
            for side in (self.teacher, self.student)
        )
        return left, right


@dataclass(frozen=True)
class Block:
    """Similarities of one kind's components.

    ``draws`` is ``None`` for measures that are not resampled, ``chance`` where none was subtracted.
    """

    value: Table
    draws: Draws | None = None
    chance: Table | None = None


def places(components: Components, kind: NodeKind) -> list[int]:
    """Where the components of a kind are among the nodes."""
    return [place for place, node in enumerate(components.nodes) if node.kind == kind]


def cka_block(pair: Pair) -> Block:
    return Block(*_cka(pair))


def correlation_block(pair: Pair) -> Block:
    return Block(*pattern_similarity(pair.teacher, pair.student, pair.weights))


def default_head_block(pair: Pair) -> Block:
    output, output_draws = _cka(pair)
    pattern, pattern_draws = pattern_similarity(pair.teacher, pair.student, pair.weights)
    return Block((output + pattern) / 2, (output_draws + pattern_draws) / 2)


def _cka(pair: Pair) -> tuple[Table, Draws]:
    teacher, student = pair.features()
    rows = pair.teacher.row_prompt
    return output_similarity(teacher, student, rows, pair.weights, pair.progress)


def output_block(measure: OutputMeasure, pair: Pair) -> Block:
    teacher, student = (
        [measure.prepare(x.double().numpy()) for x in side] for side in pair.features()
    )
    value = _pairwise(measure, teacher, student)
    if not pair.corrected:
        return Block(value)
    shuffled = [
        _pairwise(measure, teacher, [x[order] for x in student])
        for order in _shuffles(pair.student)
    ]
    chance = np.mean(shuffled, axis=0)
    return Block(_above(chance, value), chance=chance)


def cosine_block(pair: Pair) -> Block:
    value, draws = pattern_similarity(pair.teacher, pair.student, pair.weights, common=False)
    return _above_average(Block(value, draws), pair)


def js_block(pair: Pair) -> Block:
    return _above_average(Block(js_similarity(pair.teacher, pair.student)), pair)


def circuit_block(pair: Pair) -> Block:
    if pair.circuits is None:
        raise InputError(
            "QK and OV circuits are computed from weights, not recorded: give circuits=(teacher's, "
            "student's), each [head, row, column] over the same words."
        )
    teacher, student = (np.asarray(side.double().cpu()) for side in pair.circuits)
    for side, scores, recording in (
        ("teacher", teacher, pair.teacher),
        ("student", student, pair.student),
    ):
        heads = len(places(recording, "head"))
        if scores.ndim != 3 or len(scores) != heads:
            raise InputError(
                f"The {side} has {heads} heads: its circuits must be [head, row, column], not of "
                f"shape {scores.shape}."
            )
        if not np.isfinite(scores).all():
            raise InputError(f"The {side}'s circuits hold NaN or infinite values.")
    if teacher.shape[1:] != student.shape[1:]:
        raise InputError(
            f"The circuits are over {teacher.shape[1:]} words in the teacher and "
            f"{student.shape[1:]} in the student; they must be the same words."
        )
    return Block(np.clip(circuit_correlations(teacher, student), 0, 1))


def paper_head_block(pair: Pair) -> Block:
    return Block(paper_head_similarity(pair.teacher, pair.student))


def paper_mlp_block(pair: Pair) -> Block:
    widths = {x.shape[1] for side in (pair.teacher, pair.student) for x in side.raw_mlp}
    if len(widths) > 1:
        raise InputError(
            f"The paper's MLP measure compares models of one width, not {sorted(widths)}."
        )
    teacher, student = (
        [top_directions(x.double().numpy()) for x in side.raw_mlp]
        for side in (pair.teacher, pair.student)
    )
    return Block(np.array([[mean_direction_cosine(x, y) for y in student] for x in teacher]))


def rescaled_mlp_block(pair: Pair) -> Block:
    return Block(rescaled(paper_mlp_block(pair).value, paper_head_block(pair).value))


@dataclass(frozen=True)
class ComponentMeasure:
    """How heads and how MLPs are compared."""

    heads: Callable[[Pair], Block]
    mlps: Callable[[Pair], Block] = cka_block


COMPONENT_MEASURES: Mapping[str, ComponentMeasure] = MappingProxyType(
    {
        "default": ComponentMeasure(default_head_block),
        "cka": ComponentMeasure(cka_block),
        "procrustes": ComponentMeasure(*2 * [partial(output_block, procrustes)]),
        "principal_angles": ComponentMeasure(*2 * [partial(output_block, principal_angles)]),
        "svcca": ComponentMeasure(*2 * [partial(output_block, svcca)]),
        "attention_correlation": ComponentMeasure(correlation_block),
        "attention_cosine": ComponentMeasure(cosine_block),
        "attention_js": ComponentMeasure(js_block),
        "qk_circuit": ComponentMeasure(circuit_block),
        "ov_circuit": ComponentMeasure(circuit_block),
        "paper": ComponentMeasure(paper_head_block, paper_mlp_block),
        "paper_rescaled": ComponentMeasure(paper_head_block, rescaled_mlp_block),
    }
)


def _pairwise(measure: OutputMeasure, teacher: list[Rows], student: list[Rows]) -> Table:
    return np.array([[measure.compare(x, y) for y in student] for x in teacher])


def _above(
    chance: Float[np.ndarray, "*draw #teacher #student"],
    value: Float[np.ndarray, "*draw teacher student"],
) -> Float[np.ndarray, "*draw teacher student"]:
    """(value − chance) / (1 − chance), not below 0: 0 at chance, 1 where the value is 1."""
    room = np.broadcast_to(1 - chance, value.shape)
    above = np.divide(value - chance, room, out=np.zeros_like(value), where=room > _NO_ROOM)
    return np.clip(above, 0, 1)


def _above_average(block: Block, pair: Pair) -> Block:
    """Corrected by the average over all pairs of heads, most of which are unrelated.

    No shuffle of prompts breaks up a prompt-averaged pattern.
    """
    if not pair.corrected:
        return block
    chance = block.value.mean(keepdims=True)
    draws = block.draws
    if draws is not None:
        draws = _above(draws.mean((1, 2), keepdims=True), draws)
    filled = np.full_like(block.value, chance.item())
    return Block(_above(chance, block.value), draws, filled)


def _shuffles(components: Components) -> Iterator[Int[np.ndarray, "row"]]:
    """Orders of the rows in which no prompt keeps its place, the same for all components.

    Prompts change places within their group, whole and position by position, so that what is left
    is what any two prompts have in common. Prompts that are alone in their group change places with
    each other, row by row (and if there is only one such prompt, it stays).
    """
    generator = np.random.default_rng(0)
    row_prompt = components.row_prompt.numpy()
    of_prompt = [np.flatnonzero(row_prompt == p) for p in range(row_prompt.max() + 1)]
    groups = [group.numpy() for group in components.group_prompts]
    alone = [of_prompt[group[0]] for group in groups if len(group) == 1]
    if len(of_prompt) == 1:
        raise InputError("A single prompt has no chance level: take more.")
    for _ in range(_SHUFFLES):
        order = np.arange(len(row_prompt))
        for group in groups:
            cycle = generator.permutation(group)
            for here, there in zip(cycle, np.roll(cycle, 1), strict=True):
                order[of_prompt[here]] = of_prompt[there]
        if len(alone) > 1:
            mixed = generator.permutation(len(alone))
            rows = np.concatenate([alone[k] for k in mixed])
            order[rows] = np.roll(rows, len(alone[mixed[0]]))
        yield order
