"""The measures of the paper "Distilled Circuits", with its rescaling and its list of pairs.

Kept for continuity. `top_directions` looks at uncentred second moments, `mean_direction_cosine`
averages all nine signed cosines of two models' top three: identical layers score 1/3, a rotation
destroys it, and the sign of an eigenvector, which means nothing, decides the number.
"""

from collections.abc import Sequence

import numpy as np
import scipy.linalg
from jaxtyping import Float
from numpy.typing import ArrayLike

from circuitkd.errors import InputError
from circuitkd.nodes import Node

DIRECTIONS = 3


def top_directions(x: Float[np.ndarray, "row feature"]) -> Float[np.ndarray, "direction feature"]:
    """The top three right singular vectors of XᵀX, each with its largest entry positive."""
    if min(x.shape) < DIRECTIONS:
        raise InputError(f"paper_mlp needs at least {DIRECTIONS} rows and columns, not {x.shape}.")
    width = x.shape[1]
    top = (width - DIRECTIONS, width - 1)
    directions = scipy.linalg.eigh(x.T @ x, subset_by_index=top)[1].T[::-1]  # largest first
    # A singular vector's sign is arbitrary but the measure depends on it: the entry that is largest
    # in size is made positive, so that the number is at least the same on every machine.
    largest = np.abs(directions).argmax(1)
    return directions * np.sign(np.take_along_axis(directions, largest[:, None], 1))


def mean_direction_cosine(
    x: Float[np.ndarray, "direction feature"], y: Float[np.ndarray, "direction feature"]
) -> float:
    """The size of the mean of all nine signed cosines."""
    return abs(float((x @ y.T).mean()))


def paper_mlp(x: Float[np.ndarray, "row feature"], y: Float[np.ndarray, "row feature"]) -> float:
    """The paper's MLP similarity of two arrays of one width."""
    return mean_direction_cosine(top_directions(x), top_directions(y))


def rescaled(
    mlps: Float[np.ndarray, "teacher student"], heads: Float[np.ndarray, "_ _"]
) -> Float[np.ndarray, "teacher student"]:
    """The paper's affine map of MLP similarities onto the scale of the heads'.

    Standardised over all pairs of MLPs (population standard deviation), given mean and sample
    standard deviation of all pairs of heads, divided by the maximum: the best pair of MLPs scores
    exactly 1, whatever it was, and others may fall below 0.

    >>> rescaled(np.array([[0.1, 0.2]]), np.array([[0.5, 0.7, 0.9]]))
    array([[0.55555556, 1.        ]])
    """
    if heads.size < 2:
        raise InputError("The paper's rescaling needs at least two pairs of heads.")
    spread = mlps.std()
    standard = (mlps - mlps.mean()) / spread if spread > 0 else np.zeros_like(mlps)
    mapped = heads.mean() + heads.std(ddof=1) * standard
    if mapped.max() <= 0:
        raise InputError("The paper's rescaling divides by the best MLP's similarity, which is 0.")
    return mapped / mapped.max()


def paper_pairs(
    teacher_influence: ArrayLike,
    student_influence: ArrayLike,
    similarity: Float[np.ndarray, "teacher student"],
    teacher_nodes: Sequence[Node],
    student_nodes: Sequence[Node],
    *,
    repeat_heads_below: float | None = None,
) -> Float[np.ndarray, "pair 3"]:
    """The paper's list of matched pairs: rows (I_S, I_T, S) for ``paper_alignment``.

    Each student component goes with its most similar teacher component of the same kind. With
    ``repeat_heads_below`` (the paper's 0.95) heads at a lower similarity are listed a second time,
    as two of its published lists do; influences are then normalised over the longer list.
    """
    teacher = np.asarray(teacher_influence, dtype=np.float64)
    student = np.asarray(student_influence, dtype=np.float64)
    pairs, again = [], []
    for j, node in enumerate(student_nodes):
        rows = [i for i, other in enumerate(teacher_nodes) if other.kind == node.kind]
        if not rows:
            continue
        best = max(rows, key=lambda i: similarity[i, j])  # the first of several that are equal
        value = similarity[best, j]
        pairs.append((student[j], teacher[best], value))
        if repeat_heads_below is not None and node.kind == "head" and value < repeat_heads_below:
            again.append(pairs[-1])
    return np.array(pairs + again).reshape(-1, 3)
