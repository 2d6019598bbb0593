"""How alike two components are.

**On plain arrays**, `similarity(x, y, measure)`:

- ``cka``: linear CKA with the unbiased estimate of HSIC (Song et al. 2012, as used by Nguyen et
  al. 2021). With K = XXᵀ, L = YYᵀ for centred X, Y of n rows, their diagonals set to zero (K̃, L̃),

      HSIC₁(K, L) = [tr(K̃L̃) + (1ᵀK̃1)(1ᵀL̃1) / ((n−1)(n−2)) − 2/(n−2) · 1ᵀK̃L̃1] / (n(n−3))
      CKA(X, Y)   = HSIC₁(K, L) / √(HSIC₁(K, K) · HSIC₁(L, L))

  Everything is computed in feature space (tr(KL) = ‖XᵀY‖²), so no n × n matrix is formed.
- ``procrustes``: what the best rotation and scaling c of Y explains of X, both centred (Schönemann
  1966). With ‖·‖_* the sum of singular values and ρ² the normalised residual,

      ρ²(X, Y) = min over c, QᵀQ = 1 of ‖X − c Y Q‖² / ‖X‖² = 1 − (‖XᵀY‖_* / (‖X‖ ‖Y‖))²
      procrustes(X, Y) = 1 − ρ²

  Of different widths, the narrower array counts as padded with zeros, which changes no number.
- ``principal_angles``: mean squared cosine of the principal angles between the spans, in row space,
  of the top k left singular vectors U, V of centred X, Y: ‖UᵀV‖² / k (Björck & Golub 1973). k = 10,
  or the smaller rank. Unrelated arrays of n independent rows score k / (n − 1).
- ``svcca``: mean canonical correlation of the singular directions that hold 99 % of the variance of
  each centred array: the mean of the singular values of UᵀV (Raghu et al. 2017). Unrelated arrays
  score high unless rows are many times the directions kept.
- ``attention_correlation``: cosine of patterns minus uniform attention (see below for components).
- ``attention_cosine``: cosine of patterns as they are; unrelated heads score about 0.7.
- ``attention_js``: 1 − Jensen–Shannon divergence in bits of each query's attention, averaged over
  queries (Lin 1991). Attention missing from a row counts as one more key.
- ``qk_circuit``, ``ov_circuit``: correlation of two heads' score matrices from word to word
  (``circuits.attention``) after each row's mean is taken away: a constant on a row changes neither
  attention nor probabilities.
- ``paper_mlp`` and ``paper_head``: the measures of the paper "Distilled Circuits", kept for
  continuity. `paper_mlp` averages all nine signed cosines of the top three right singular vectors
  of the uncentred second moments: identical layers score 1/3, and a rotation destroys it.

`MEASURES` says for each what it looks at, its range, its chance level and its invariances.

**On two models' components**, `component_similarity`, the measure behind the alignment. It is
computed on what an ablation removes (activation minus its mean-ablation value):

- *Output part* (heads and MLPs): CKA with that mean in place of the sample mean, debiased at the
  level of prompts. The rows of one prompt are not independent, and copies of one prompt in a
  bootstrap sample must not count as agreement, so only rows of different prompts p ≠ q are paired:

      M^{ij}_{pq} = Σ_{r∈p, s∈q} ⟨xⁱ_r, xⁱ_s⟩ ⟨yʲ_r, yʲ_s⟩
      S_ij = max(0, Σ_{p≠q} w_p w_q M^{ij}_{pq} / √(Σ w_p w_q M^{ii}_{pq} · Σ w_p w_q M^{jj}_{pq}))

- *Pattern part* (heads): the cosine, clipped at 0, of prompt-averaged attention patterns minus one
  common pattern for both models: the mean of the teacher's average head and the student's. (One
  pattern for both sides, so that splitting or merging heads changes nothing.)

Heads score the mean of both parts, MLPs the output part, a head against an MLP 0. All of it is
unchanged by rotating the residual stream or by permuting, rescaling, splitting or merging heads.

Others on request, ``component_similarity(..., measure=...)``. Outputs are centred as above, and
patterns averaged over the prompts of each group. A measure of patterns or of circuits says nothing
about MLPs; theirs is then the default's. Measures that do not score 0 at chance are corrected,
(S − chance) / (1 − chance), not below 0, so that a table can serve an alignment:

- ``procrustes``, ``principal_angles``, ``svcca``: chance is the same pair's similarity with the
  student's prompts shuffled within their groups. What any two prompts have in common is chance.
- ``attention_cosine``, ``attention_js``: chance is the average over all pairs of heads.
- ``paper`` (the paper's heads and MLPs) and ``paper_rescaled`` (its MLPs mapped onto the heads'
  mean and standard deviation, then divided by their maximum) stay as published.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Real
from numpy.typing import ArrayLike
from torch import Tensor

from circuitkd.circuits.activations import Components
from circuitkd.compare._arrays import as_matrix
from circuitkd.compare._blocks import COMPONENT_MEASURES, Block, Circuits, Pair, places
from circuitkd.compare._measures import MEASURES, Measure
from circuitkd.errors import InputError
from circuitkd.nodes import NodeKind

__all__ = [
    "COMPONENT_MEASURES",
    "MEASURES",
    "RECORDED_MEASURES",
    "ComponentSimilarity",
    "Measure",
    "check_recordings",
    "component_similarity",
    "paper_similarity",
    "same_kind",
    "similarity",
]


RECORDED_MEASURES = tuple(
    name for name in COMPONENT_MEASURES if name not in ("qk_circuit", "ov_circuit")
)
"""The measures of components that need nothing but recordings."""

_RESAMPLED = ("default", "cka", "attention_correlation", "attention_cosine")


def similarity(x: ArrayLike | Tensor, y: ArrayLike | Tensor, measure: str = "cka") -> float:
    """How alike two arrays are.

    Args:
        x: what the measure looks at (``MEASURES[measure].on``): a component's output
            ``[row, feature]``, an attention pattern ``[query, key]`` averaged over prompts, or a
            circuit's scores ``[query, key]`` from word to word.
        y: likewise; its row r belongs to the same prompt and position, query, or word as row r of
            ``x``. Outputs may have different widths (except for ``paper_mlp``).
        measure: one of ``MEASURES``; formulas are in this module's docstring.

    Returns:
        A number between ``MEASURES[measure].low`` and ``.high``; what unrelated arrays score is in
        ``.chance``. Arrays that are alike in what the measure looks at score 1 (`paper_mlp`: 1/3).
        A constant array resembles nothing: 0.

    Raises:
        InputError: mismatched or too few rows, mismatched widths, NaN, or an unknown measure.

    >>> rows = np.random.default_rng(0).normal(size=(50, 3))
    >>> rotation = np.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    >>> round(similarity(rows, 2 * rows @ rotation + 5), 6)
    1.0
    >>> round(similarity(rows, rows, measure="paper_mlp"), 6)
    0.333333
    """
    if measure not in MEASURES:
        raise InputError(f"Unknown measure {measure!r}; choose one of {', '.join(MEASURES)}.")
    left, right = as_matrix(x, "x"), as_matrix(y, "y")
    if len(left) != len(right):
        raise InputError(
            f"x has {len(left)} rows and y {len(right)}; row r of both must be the same prompt "
            "and position."
        )
    chosen = MEASURES[measure]
    if chosen.same_shape and left.shape != right.shape:
        raise InputError(
            f"{measure} compares arrays of one width, not {left.shape[1]} with {right.shape[1]} "
            "columns" + ("; use measure='cka'." if chosen.on == "output" else ".")
        )
    return chosen.compare(left, right)


@dataclass(frozen=True)
class ComponentSimilarity:
    """Similarities of every teacher component with every student component, all in [0, 1].

    ``value`` uses every prompt once; ``draws`` holds the same numbers for each set of bootstrap
    weights (float32, no draws when none were asked for). ``chance`` is what was subtracted from
    each pair, 0 where the measure needs no correction.
    """

    value: Float[np.ndarray, "teacher student"]
    draws: Float[np.ndarray, "draw teacher student"]
    chance: Float[np.ndarray, "teacher student"]


def component_similarity(
    teacher: Components,
    student: Components,
    weights: Real[np.ndarray, "draw prompt"] | None = None,
    *,
    measure: str = "default",
    corrected: bool = True,
    circuits: Circuits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ComponentSimilarity:
    """The similarity of every teacher component with every student component.

    Args:
        teacher: its components, recorded at the compared positions.
        student: likewise, on the same prompts at the same positions in the same order.
        weights: how often each prompt counts, one row for each bootstrap draw.
        measure: one of ``COMPONENT_MEASURES``; see this module's docstring.
        corrected: take chance away where the measure does not score 0 at chance.
        circuits: for ``qk_circuit`` and ``ov_circuit``: both models' scores [head, row, column]
            for all heads in node order (``circuits.attention.qk_circuit`` or ``ov_circuit``, layer
            by layer), over the same words.
        progress: called as ``progress(stage, done, total)``, done and total in prompts.

    The draws take ``draws × teacher × student × 4`` bytes; everything else is chunked.

    Raises:
        InputError: the recordings do not belong to the same prompts, or hold NaN; an unknown
            measure, or one that cannot be resampled (``procrustes``, ``principal_angles``,
            ``svcca``, ``attention_js``, circuits, the paper's) with weights.
    """
    prompts = check_recordings(teacher, student)
    if measure not in COMPONENT_MEASURES:
        known = ", ".join(COMPONENT_MEASURES)
        raise InputError(f"Unknown measure {measure!r} of components; choose one of {known}.")
    counts = np.zeros((0, prompts)) if weights is None else np.asarray(weights)
    if counts.shape[1] != prompts:
        raise InputError(f"There are {prompts} prompts but weights for {counts.shape[1]}.")
    shape = (len(teacher.nodes), len(student.nodes))
    result = ComponentSimilarity(
        np.zeros(shape), np.zeros((len(counts), *shape), dtype=np.float32), np.zeros(shape)
    )
    kinds: tuple[NodeKind, ...] = ("head", "mlp")
    for kind in kinds:
        rows, columns = places(teacher, kind), places(student, kind)
        if not rows or not columns:
            continue
        report = progress and partial(progress, f"Comparing {kind}s")
        pair = Pair(teacher, student, kind, counts, corrected, circuits, report)
        _fill(result, np.ix_(rows, columns), _block(measure, pair))
    return result


def _block(measure: str, pair: Pair) -> Block:
    chosen = COMPONENT_MEASURES[measure]
    block = chosen.heads(pair) if pair.kind == "head" else chosen.mlps(pair)
    if block.draws is None and len(pair.weights):
        raise InputError(
            f"Measure {measure!r} cannot be resampled over prompts: leave weights out, or choose "
            "'default', 'cka', 'attention_correlation' or 'attention_cosine'."
        )
    return block


def _fill(result: ComponentSimilarity, where: tuple[np.ndarray, ...], block: Block) -> None:
    result.value[where] = np.clip(block.value, 0, 1)
    if block.draws is not None:
        result.draws[:, where[0], where[1]] = block.draws
    if block.chance is not None:
        result.chance[where] = block.chance


def resampled_similarity(
    teacher: Components,
    student: Components,
    weights: Real[np.ndarray, "draw prompt"],
    measure: str,
    progress: Callable[[str, int, int], None] | None = None,
) -> ComponentSimilarity:
    """`component_similarity`, its draws those of ``value`` where a measure cannot be resampled."""
    if measure in _RESAMPLED:
        return component_similarity(teacher, student, weights, measure=measure, progress=progress)
    found = component_similarity(teacher, student, measure=measure, progress=progress)
    same = np.broadcast_to(found.value.astype(np.float32), (len(weights), *found.value.shape))
    return ComponentSimilarity(found.value, same, found.chance)


def paper_similarity(
    teacher: Components, student: Components, *, rescaled: bool = False
) -> Float[np.ndarray, "teacher student"]:
    """The paper's similarities: raw attention cosine for heads, `paper_mlp` for MLPs.

    Both look at raw activations: nothing is centred. A head against an MLP scores 0. With several
    groups of prompts the heads' cosines are averaged, weighted by the groups' sizes.

    ``rescaled``: map the MLPs' similarities onto the heads' scale as the paper does for number
    words and QA: the best pair of MLPs then scores 1, and a bad one is held at 0.

    Raises:
        InputError: the models' widths differ, so that the paper's MLP measure does not exist.
    """
    measure = "paper_rescaled" if rescaled else "paper"
    return component_similarity(teacher, student, measure=measure).value


def same_kind(teacher: Components, student: Components) -> Bool[np.ndarray, "teacher student"]:
    """Which pairs are two heads or two MLPs."""
    left = np.array([node.kind for node in teacher.nodes])
    right = np.array([node.kind for node in student.nodes])
    return left[:, None] == right[None, :]


def check_recordings(teacher: Components, student: Components) -> int:
    """The number of prompts; raises ``InputError`` unless both hold the same prompts and rows."""
    same_rows = teacher.row_prompt.tolist() == student.row_prompt.tolist()
    same_groups = [group.tolist() for group in teacher.group_prompts] == [
        group.tolist() for group in student.group_prompts
    ]
    if not (same_rows and same_groups):
        raise InputError(
            "Teacher and student were recorded on different prompts or positions; record both on "
            "the pair that task.sample_pair returns."
        )
    for side, recording in (("teacher", teacher), ("student", student)):
        for node, features in zip(recording.nodes, recording.features, strict=True):
            if not bool(features.isfinite().all()):
                raise InputError(f"The {side}'s {node.label} holds NaN or infinite activations.")
    return sum(len(group) for group in teacher.group_prompts)
