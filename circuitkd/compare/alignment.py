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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from circuitkd.circuits.influence_result import shares
from circuitkd.compare._arrays import as_matrix, as_shares
from circuitkd.compare.evidence import Null, Reference, Score
from circuitkd.compare.matching import Plan, _checked, transport_plan
from circuitkd.errors import InputError
from circuitkd.metrics import percentile_interval


@dataclass(frozen=True)
class Alignment:
    """An alignment in [0, 1] with its interval over prompts and its evidence.

    Attributes:
        value: every prompt counted once.
        low, high: percentile interval; both ``None`` where nothing was resampled.
        method: ``transport``, ``signed transport``, ``weighted argmax`` or ``paper``.
        draws: bootstrap samples behind the interval.
        level: coverage of the interval.
        null: the same with influences shuffled within kind; ``None`` where it was not drawn.
        ceiling: the teacher against itself on disjoint halves of the prompts.
        floor: randomly initialised students of the student's shape.
    """

    value: float
    low: float | None
    high: float | None
    method: str
    draws: int
    level: float = 0.95
    null: Null | None = None
    ceiling: Reference | None = None
    floor: Reference | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """``(low, high)``; ``None`` where nothing was resampled."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def calibrated(self) -> float | None:
        """(value - floor) / (ceiling - floor): 0 as a random student, 1 as the teacher itself.

        Not clipped. ``None`` without floor or ceiling, or where they do not lie apart.
        """
        return self._calibrate(self.value)

    @property
    def calibrated_interval(self) -> tuple[float, float] | None:
        """The interval on the calibrated scale; floor and ceiling are taken as they are."""
        ends = [self._calibrate(end) for end in self.interval or ()]
        return (ends[0], ends[1]) if len(ends) == 2 and None not in ends else None  # pyright: ignore[reportReturnType]

    def _calibrate(self, value: float) -> float | None:
        if self.floor is None or self.ceiling is None or self.ceiling.value <= self.floor.value:
            return None
        return (value - self.floor.value) / (self.ceiling.value - self.floor.value)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        interval = "" if self.interval is None else " [{:.3f}, {:.3f}]".format(*self.interval)
        parts = [f"{self.value:.3f}{interval} ({self.method})"]
        parts += [] if self.null is None else [repr(self.null)]
        for name in ("floor", "ceiling"):
            if (reference := getattr(self, name)) is not None:
                parts.append(f"{name} {reference!r}")
        if self.calibrated is not None:
            parts.append(f"calibrated {self.calibrated:.3f}")
        return ", ".join(parts)


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


def same_sign(
    teacher_effect: Float[np.ndarray, "teacher"], student_effect: Float[np.ndarray, "student"]
) -> Bool[np.ndarray, "teacher student"]:
    """Which pairs both help or both hinder. A similarity that is 0 elsewhere makes transport
    move positive and negative influence separately: what finds no partner of its sign is lost.

    >>> same_sign(np.array([-1.0, 2.0]), np.array([-3.0]))
    array([[ True],
           [False]])
    """
    return np.sign(teacher_effect)[:, None] == np.sign(student_effect)[None, :]


def weighted_argmax_alignment(
    teacher_share: ArrayLike,
    student_share: ArrayLike,
    similarity: ArrayLike,
    same_kind: Bool[np.ndarray, "teacher student"],
) -> float:
    """Each student component with its most similar teacher component, weighted by influence:

        A = Σ_j w_j S_{b(j) j} / Σ_j w_j,   w_j = (p_{b(j)} + q_j) / 2,   b(j) = argmax_i S_ij

    It repairs the paper's blindness to influence and keeps its matching: many student components
    may claim one teacher component, and teacher components that nobody claims cost nothing.

    >>> weighted_argmax_alignment([0.9, 0.1], [1.0], [[1.0], [0.2]], np.ones((2, 1), bool))
    1.0
    """
    p, q, s = _checked(teacher_share, student_share, similarity)
    best = np.where(same_kind, s, -np.inf).argmax(0)
    columns = np.arange(len(q))
    usable = same_kind[best, columns]
    weights = ((p[best] + q) / 2)[usable]
    if not weights.any():
        return 0.0
    return float(weights @ s[best, columns][usable] / weights.sum())


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
    best, columns = np.where(same_kind, similarity, -np.inf).argmax(0), np.arange(len(student))
    pairs = np.stack([student, teacher[best], similarity[best, columns]], axis=1)
    return paper_alignment(pairs[same_kind[best, columns]])


def transport_score(
    teacher_effect: Float[np.ndarray, "teacher"],
    student_effect: Float[np.ndarray, "student"],
    similarity: Float[np.ndarray, "teacher student"],
) -> float:
    """The transport alignment of two models' mean effects; NaN where one has no influence."""
    if not (teacher_effect.any() and student_effect.any()):
        return np.nan
    return transport_alignment(shares(teacher_effect), shares(student_effect), similarity)[0]


def signed_transport_score(
    teacher_effect: Float[np.ndarray, "teacher"],
    student_effect: Float[np.ndarray, "student"],
    similarity: Float[np.ndarray, "teacher student"],
) -> float:
    """The same with positive and negative influence transported separately."""
    alike = similarity * same_sign(teacher_effect, student_effect)
    return transport_score(teacher_effect, student_effect, alike)


def argmax_score(same_kind: Bool[np.ndarray, "teacher student"], *, paper: bool) -> Score:
    """The paper's alignment, or the influence-weighted argmax, as a score."""
    formula = argmax_paper_alignment if paper else weighted_argmax_alignment

    def score(
        teacher_effect: Float[np.ndarray, "teacher"],
        student_effect: Float[np.ndarray, "student"],
        similarity: Float[np.ndarray, "teacher student"],
    ) -> float:
        p, q = shares(teacher_effect), shares(student_effect)
        best = np.where(same_kind, similarity, -np.inf).argmax(0)
        if not (p[best].any() and q.any()):
            return np.nan
        return formula(p, q, similarity, same_kind)

    return score


def bootstrap_scores(
    score: Score,
    teacher_effect: Float[np.ndarray, "draw teacher"],
    student_effect: Float[np.ndarray, "draw student"],
    similarity: Iterable[Float[np.ndarray, "teacher student"]],
) -> Float[np.ndarray, "drawn"]:
    """The alignment of every draw in which it exists."""
    draws = zip(teacher_effect, student_effect, similarity, strict=True)
    values = np.array([score(p, q, s) for p, q, s in draws])
    return values[np.isfinite(values)]


def with_interval(value: float, draws: Float[np.ndarray, "draw"], method: str) -> Alignment:
    """An `Alignment` whose interval holds the middle 95 % of the draws; none without draws."""
    if len(draws) == 0:
        return Alignment(value, None, None, method, 0)
    low, high = percentile_interval(draws, level=0.95)
    return Alignment(value, float(low), float(high), method, len(draws))
