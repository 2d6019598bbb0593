"""How alike two components are.

**On plain arrays**, `similarity(x, y, measure)`:

- ``cka``: linear CKA with the unbiased estimate of HSIC (Song et al. 2012, as used by Nguyen et
  al. 2021). With K = XXᵀ, L = YYᵀ for centred X, Y of n rows, their diagonals set to zero (K̃, L̃),

      HSIC₁(K, L) = [tr(K̃L̃) + (1ᵀK̃1)(1ᵀL̃1) / ((n−1)(n−2)) − 2/(n−2) · 1ᵀK̃L̃1] / (n(n−3))
      CKA(X, Y)   = HSIC₁(K, L) / √(HSIC₁(K, K) · HSIC₁(L, L))

  Everything is computed in feature space (tr(KL) = ‖XᵀY‖²), so no n × n matrix is formed.
- ``paper_mlp`` and ``paper_head``: the measures of the paper "Distilled Circuits", kept for
  continuity. `paper_mlp` averages all nine signed cosines of the top three right singular vectors
  of the uncentred second moments: identical layers score 1/3, and a rotation destroys it.

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
from circuitkd.compare._outputs import output_similarity
from circuitkd.compare._patterns import mean_row_cosine, paper_head_similarity, pattern_similarity
from circuitkd.errors import InputError
from circuitkd.nodes import NodeKind

MEASURES = ("cka", "paper_mlp", "paper_head")
_PAPER_DIRECTIONS = 3


def similarity(x: ArrayLike | Tensor, y: ArrayLike | Tensor, measure: str = "cka") -> float:
    """How alike two arrays are.

    Args:
        x: for ``cka`` and ``paper_mlp`` activations ``[row, feature]``; for ``paper_head`` an
            attention pattern averaged over prompts, ``[query, key]``.
        y: likewise; its row r belongs to the same prompt and position as row r of ``x``.
        measure: ``cka`` allows different widths; it is at most 1, 1 for arrays equal up to
            rotation, scale and translation, and about 0 (of either sign) for independent ones.
            ``paper_mlp`` lies in [0, 1] and needs equal widths; ``paper_head`` in [-1, 1].

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
    if measure == "cka":
        return _debiased_cka(left, right)
    if left.shape != right.shape:
        raise InputError(
            f"{measure} compares arrays of one width, not {left.shape[1]} with {right.shape[1]} "
            "columns; use measure='cka'."
        )
    return _paper_mlp(left, right) if measure == "paper_mlp" else mean_row_cosine(left, right)


@dataclass(frozen=True)
class ComponentSimilarity:
    """Similarities of every teacher component with every student component, all in [0, 1].

    ``value`` uses every prompt once; ``draws`` holds the same numbers for each set of bootstrap
    weights (float32, no draws when none were asked for).
    """

    value: Float[np.ndarray, "teacher student"]
    draws: Float[np.ndarray, "draw teacher student"]


def component_similarity(
    teacher: Components,
    student: Components,
    weights: Real[np.ndarray, "draw prompt"] | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> ComponentSimilarity:
    """The default similarity of every teacher component with every student component.

    Args:
        teacher: its components, recorded at the compared positions.
        student: likewise, on the same prompts at the same positions in the same order.
        weights: how often each prompt counts, one row for each bootstrap draw.
        progress: called as ``progress(stage, done, total)``, done and total in prompts.

    The draws take ``draws × teacher × student × 4`` bytes; everything else is chunked.

    Raises:
        InputError: the recordings do not belong to the same prompts, or hold NaN.
    """
    prompts = check_recordings(teacher, student)
    counts = np.zeros((0, prompts)) if weights is None else np.asarray(weights)
    if counts.shape[1] != prompts:
        raise InputError(f"There are {prompts} prompts but weights for {counts.shape[1]}.")
    shape = (len(teacher.nodes), len(student.nodes))
    value = np.zeros(shape)
    draws = np.zeros((len(counts), *shape), dtype=np.float32)
    for kind in ("head", "mlp"):
        rows, columns = _places(teacher, kind), _places(student, kind)
        if not rows or not columns:
            continue
        block = np.ix_(rows, columns)
        part, part_draws = output_similarity(
            [teacher.features[place] for place in rows],
            [student.features[place] for place in columns],
            teacher.row_prompt,
            counts,
            progress and partial(progress, f"Comparing {kind}s"),
        )
        if kind == "head":
            pattern, pattern_draws = pattern_similarity(teacher, student, counts)
            part, part_draws = (part + pattern) / 2, (part_draws + pattern_draws) / 2
        value[block] = part
        draws[:, block[0], block[1]] = part_draws
    return ComponentSimilarity(value, draws)


def paper_similarity(
    teacher: Components, student: Components
) -> Float[np.ndarray, "teacher student"]:
    """The paper's similarities: raw attention cosine for heads, `paper_mlp` for MLPs.

    Both look at raw activations: nothing is centred. A head against an MLP scores 0. With several
    groups of prompts the heads' cosines are averaged, weighted by the groups' sizes.

    Raises:
        InputError: the models' widths differ, so that the paper's MLP measure does not exist.
    """
    check_recordings(teacher, student)
    values = np.zeros((len(teacher.nodes), len(student.nodes)))
    heads = _places(teacher, "head"), _places(student, "head")
    if all(heads):
        values[np.ix_(*heads)] = paper_head_similarity(teacher, student)
    for i, left in zip(_places(teacher, "mlp"), teacher.raw_mlp, strict=True):
        for j, right in zip(_places(student, "mlp"), student.raw_mlp, strict=True):
            values[i, j] = similarity(left, right, measure="paper_mlp")
    return values


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


def _places(components: Components, kind: NodeKind) -> list[int]:
    return [place for place, node in enumerate(components.nodes) if node.kind == kind]


def _debiased_cka(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 4:
        raise InputError(f"Debiased CKA needs at least 4 rows, not {len(x)}.")
    # HSIC₁ does not change under translation; centring and scaling only spare rounding errors.
    x, y = _standardised(x), _standardised(y)
    own = _hsic(x, x) * _hsic(y, y)
    # A constant array resembles nothing; nor does one whose debiased size is not positive.
    return float(np.clip(_hsic(x, y) / np.sqrt(own), -1, 1)) if own > 0 else 0.0


def _standardised(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(0)
    size = np.sqrt((centred**2).mean())
    noise = 1e-12 * np.abs(x).max()
    return centred / size if size > noise else np.zeros_like(x)


def _hsic(x: Float[np.ndarray, "row left"], y: Float[np.ndarray, "row right"]) -> float:
    """HSIC₁ of XXᵀ and YYᵀ from d × d products only."""
    n = len(x)
    diagonal_x, diagonal_y = (x**2).sum(1), (y**2).sum(1)
    trace = ((x.T @ y) ** 2).sum() - diagonal_x @ diagonal_y
    rows_x, rows_y = x @ x.sum(0) - diagonal_x, y @ y.sum(0) - diagonal_y
    totals = rows_x.sum() * rows_y.sum() / ((n - 1) * (n - 2))
    return float((trace + totals - 2 * (rows_x @ rows_y) / (n - 2)) / (n * (n - 3)))


def _paper_mlp(x: np.ndarray, y: np.ndarray) -> float:
    return abs(float((_top_directions(x) @ _top_directions(y).T).mean()))


def _top_directions(x: Float[np.ndarray, "row feature"]) -> Float[np.ndarray, "direction feature"]:
    if min(x.shape) < _PAPER_DIRECTIONS:
        raise InputError(
            f"paper_mlp needs at least {_PAPER_DIRECTIONS} rows and columns, not {x.shape}."
        )
    directions = np.linalg.svd(x.T @ x)[2][:_PAPER_DIRECTIONS]
    # A singular vector's sign is arbitrary but the measure depends on it: the entry that is largest
    # in size is made positive, so that the number is at least the same on every machine.
    largest = np.abs(directions).argmax(1)
    return directions * np.sign(np.take_along_axis(directions, largest[:, None], 1))
