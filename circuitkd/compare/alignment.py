"""One number for how far the student's circuit is the teacher's.

**Transport alignment.** With p, q the influence shares of the teacher's and the student's
components and S their similarities,

    A = max over plans π of p onto q of Σ_ij π_ij S_ij     (0 ≤ A ≤ 1)

A = 1 for a model against itself, and also when one student head does exactly what two teacher
heads did, or two share what one did: merging and splitting cost nothing. Mass that finds nothing
similar costs its whole share.

**The paper's alignment** ("Distilled Circuits"). Over a list C of matched pairs, with raw
influences I and their sums over the list Î = I / Σ_C I,

    (1/|C|) Σ_C S · (1 − |Î_S − Î_T|)

It is nearly the unweighted mean similarity: the Î sum to 1, so the penalty is at most
2 max S / |C|.
circuitkd reports it for continuity, next to the transport alignment.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from circuitkd.compare._arrays import as_matrix, as_shares
from circuitkd.compare.matching import Plan, _checked, transport_plan
from circuitkd.errors import InputError
from circuitkd.metrics import percentile_interval


@dataclass(frozen=True)
class Alignment:
    """An alignment in [0, 1] with a bootstrap interval over prompts.

    Attributes:
        value: every prompt counted once.
        low, high: percentile interval; both ``None`` where nothing was resampled.
        method: ``transport`` or ``paper``.
        draws: bootstrap samples behind the interval.
        level: coverage of the interval.
    """

    value: float
    low: float | None
    high: float | None
    method: str
    draws: int
    level: float = 0.95

    @property
    def interval(self) -> tuple[float, float] | None:
        """``(low, high)``; ``None`` where nothing was resampled."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f} ({self.method})"
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}] ({self.method})"


def transport_alignment(
    teacher_share: ArrayLike, student_share: ArrayLike, similarity: ArrayLike
) -> tuple[float, Plan]:
    """The transport alignment and its plan ``[teacher, student]``.

    Influences are scaled to sum 1 here.

    Raises:
        InputError: mismatched shapes, NaN, similarities outside [0, 1], or all-zero influences.

    >>> value, plan = transport_alignment([0.5, 0.5], [1.0], [[1.0], [1.0]])   # a merge
    >>> value
    1.0
    """
    p, q, s = _checked(teacher_share, student_share, similarity)
    plan = transport_plan(p, q, s)
    # Marginals are exact only to rounding, which must not lift a perfect score above 1.
    return min(1.0, float((plan * s).sum())), plan


def paper_alignment(pairs: Iterable[Sequence[float]] | ArrayLike) -> float:
    """The paper's alignment of matched pairs.

    Args:
        pairs: rows (I_S, I_T, S): student's and teacher's influence in any common-to-the-model
            unit (their sizes are used, normalised over the list) and similarity.

    Raises:
        InputError: no pairs, rows of another length, NaN, or a model without any influence.

    >>> paper_alignment([(10, 3, 1.0), (30, 9, 0.5)])
    0.75
    """
    rows = as_matrix(pairs if isinstance(pairs, np.ndarray) else list(pairs), "pairs")  # pyright: ignore[reportArgumentType]
    if rows.shape[1] != 3:
        raise InputError(f"Each pair must be (I_S, I_T, S), three numbers, not {rows.shape[1]}.")
    student = as_shares(np.abs(rows[:, 0]), "The student's influence")
    teacher = as_shares(np.abs(rows[:, 1]), "The teacher's influence")
    return float((rows[:, 2] * (1 - np.abs(student - teacher))).mean())


def argmax_paper_alignment(
    teacher_influence: ArrayLike,
    student_influence: ArrayLike,
    similarity: Plan,
    same_kind: Bool[np.ndarray, "teacher student"],
) -> float:
    """The paper's alignment with each student component's best teacher of the same kind."""
    teacher = np.asarray(teacher_influence, dtype=np.float64)
    student = np.asarray(student_influence, dtype=np.float64)
    best = np.where(same_kind, similarity, -np.inf).argmax(0)
    matched = [(j, i) for j, i in enumerate(best) if same_kind[i, j]]
    return paper_alignment([(student[j], teacher[i], similarity[i, j]) for j, i in matched])


def bootstrap_transport(
    teacher_share: Float[np.ndarray, "draw teacher"],
    student_share: Float[np.ndarray, "draw student"],
    similarity: Float[np.ndarray, "draw teacher student"],
    progress: Callable[[str, int, int], None] | None = None,
) -> Float[np.ndarray, "drawn"]:
    """The transport alignment of every draw in which both models have influence."""
    values = []
    draws = zip(teacher_share, student_share, similarity, strict=True)
    for done, (p, q, s) in enumerate(draws, start=1):
        if p.any() and q.any():
            values.append(transport_alignment(p, q, s)[0])
        if progress is not None:
            progress("Resampling the alignment", done, len(similarity))
    return np.array(values)


def with_interval(value: float, draws: Float[np.ndarray, "draw"], method: str) -> Alignment:
    """An `Alignment` whose interval holds the middle 95 % of the draws; none without draws."""
    if len(draws) == 0:
        return Alignment(value, None, None, method, 0)
    low, high = percentile_interval(draws, level=0.95)
    return Alignment(value, float(low), float(high), method, len(draws))
