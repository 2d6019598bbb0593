"""Which teacher component goes with which student component, and what that says.

Three matchings, each an array of mass ``[teacher, student]``:

- ``argmax``: every student component with its most similar teacher component (the paper's way);
  a teacher component may be taken many times, or never. Mass: the student component's share.
- ``one-to-one``: the assignment with the greatest sum of similarities (Hungarian algorithm).
  Mass: the smaller of the two shares.
- ``transport``: the optimal transport plan of the teacher's influence shares p onto the student's
  q, π = argmax Σ_ij π_ij S_ij with Σ_j π_ij = p_i, Σ_i π_ij = q_j (POT's exact solver, cost 1 − S).
  It is the only one that knows how much each component matters, and the one behind the alignment.

The plan is the story. A row spread over several columns is a teacher component that was split, a
column fed by several rows a merge, and mass that had to move at low similarity was dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ot
import pandas as pd
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from circuitkd.compare._arrays import as_matrix, as_shares
from circuitkd.errors import InputError, RunError
from circuitkd.nodes import Node

MATCHINGS = ("argmax", "one-to-one", "transport")
Plan = Float[np.ndarray, "teacher student"]

_DUST = 1e-12
"""Mass below this is rounding of the solver, not a match."""


def match(
    teacher_share: ArrayLike,
    student_share: ArrayLike,
    similarity: ArrayLike,
    method: str = "transport",
    same_kind: Bool[np.ndarray, "teacher student"] | None = None,
) -> Plan:
    """The mass between every teacher and student component under a matching.

    Args:
        teacher_share: influences of the teacher's components (scaled to sum 1 here).
        student_share: likewise of the student's.
        similarity: ``[teacher, student]`` in [0, 1].
        method: ``argmax``, ``one-to-one`` or ``transport``.
        same_kind: pairs that ``argmax`` and ``one-to-one`` may use; all by default.

    Raises:
        InputError: unknown method, mismatched shapes, NaN, or a model without any influence.

    >>> match([0.5, 0.5], [1.0], [[0.9], [0.8]])
    array([[0.5],
           [0.5]])
    >>> match([0.5, 0.5], [1.0], [[0.9], [0.8]], method="argmax")
    array([[1.],
           [0.]])
    """
    p, q, s = _checked(teacher_share, student_share, similarity)
    if method not in MATCHINGS:
        raise InputError(f"Unknown matching {method!r}; choose one of {', '.join(MATCHINGS)}.")
    if method == "transport":
        return transport_plan(p, q, s)
    allowed = np.ones(s.shape, dtype=bool) if same_kind is None else same_kind
    # Similarities are never negative, so a forbidden pair loses against every allowed one.
    scores = np.where(allowed, s, -1.0)
    if method == "argmax":
        rows, columns = scores.argmax(0), np.arange(s.shape[1])
        mass = q
    else:
        rows, columns = linear_sum_assignment(scores, maximize=True)
        mass = np.minimum(p[rows], q[columns])
    usable = allowed[rows, columns]
    plan = np.zeros_like(s)
    plan[rows[usable], columns[usable]] = mass[usable]
    return plan


def transport_plan(
    p: Float[np.ndarray, "teacher"], q: Float[np.ndarray, "student"], similarity: Plan
) -> Plan:
    """The plan that moves shares p onto q at the greatest total similarity.

    Shares must each sum to 1. The plan's marginals equal them to rounding; where several plans are
    equally good, the solver's choice among them is arbitrary but always the same.
    """
    plan, log = ot.emd(p, q, 1.0 - similarity, numItermax=10_000_000, log=True)
    if log["warning"] is not None:
        raise RunError(f"The optimal transport solver did not finish: {log['warning']}")
    return np.asarray(plan)


@dataclass(frozen=True)
class Restructuring:
    """What the transport plan says was merged, split and dropped.

    Attributes:
        merges: one row for each student component that takes over several teacher components:
            ``student``, ``teachers`` (strongest first), ``mass`` (moved into it by these), and
            ``similarity`` (average over that mass).
        splits: likewise ``teacher``, ``students``, ``mass``, ``similarity``.
        drops: one row for each teacher component that lost influence: ``teacher``, ``share`` (its
            part of the teacher's influence), ``lost`` (the part that moved at low similarity), and
            ``lost_fraction`` = lost / share; largest loss first.
        threshold: similarity from which mass counts as kept.
        part: part of a component's own share that a partner must carry to count in a merge or
            split.
        least: mass below which a partner or a loss is not reported.
    """

    merges: pd.DataFrame
    splits: pd.DataFrame
    drops: pd.DataFrame
    threshold: float
    part: float
    least: float

    @property
    def lost(self) -> float:
        """The part of the teacher's influence in the reported drops, in [0, 1]."""
        return float(self.drops["lost"].sum())

    def __repr__(self) -> str:
        merges = [
            f"{', '.join(teachers)} → {student}"
            for student, teachers in zip(self.merges.student, self.merges.teachers, strict=True)
        ]
        splits = [
            f"{teacher} → {', '.join(students)}"
            for teacher, students in zip(self.splits.teacher, self.splits.students, strict=True)
        ]
        drops = [
            f"{teacher} ({lost:.1%} lost)"
            for teacher, lost in zip(self.drops.teacher, self.drops.lost, strict=True)
        ]
        return "\n".join(
            f"{title}: {'; '.join(entries) if entries else 'none'}"
            for title, entries in (("merges", merges), ("splits", splits), ("drops", drops))
        )


def restructuring(
    plan: Plan,
    similarity: Plan,
    teacher_nodes: Sequence[Node],
    student_nodes: Sequence[Node],
    *,
    threshold: float = 0.25,
    part: float = 0.1,
    least: float = 0.01,
) -> Restructuring:
    """Merges, splits and drops of a transport plan.

    A student component is a merge if at least two teacher components each give it at least
    ``part`` of its share and at least ``least`` of all influence, at similarity ``threshold`` or
    more; a split is the same seen from the teacher. A teacher component's loss is its mass that
    moves at less than ``threshold``, reported from ``least`` on.
    """
    for name, value in (("threshold", threshold), ("part", part), ("least", least)):
        if not 0 <= value <= 1:
            raise InputError(f"{name} must lie between 0 and 1, not be {value}.")
    kept = np.where(similarity >= threshold, plan, 0.0)
    share = plan.sum(1)
    lost = share - kept.sum(1)
    teachers = [node.name for node in teacher_nodes]
    students = [node.name for node in student_nodes]
    merge_rows = _gatherings(kept.T, similarity.T, plan.sum(0), part, least)
    split_rows = _gatherings(kept, similarity, share, part, least)
    drop_rows = [
        (teachers[i], share[i], lost[i], lost[i] / share[i])
        for i in np.argsort(-lost, kind="stable")
        if lost[i] > max(least, _DUST)
    ]
    return Restructuring(
        merges=_named(merge_rows, students, teachers, ["student", "teachers"]),
        splits=_named(split_rows, teachers, students, ["teacher", "students"]),
        drops=pd.DataFrame(drop_rows, columns=["teacher", "share", "lost", "lost_fraction"]),
        threshold=threshold,
        part=part,
        least=least,
    )


def gini(share: Float[np.ndarray, "component"]) -> float:
    """Gini coefficient of shares: 0 where all are equal, 1 - 1/n where one has all.

    >>> gini(np.array([0.25] * 4)), gini(np.array([0.0, 0.0, 0.0, 1.0]))
    (0.0, 0.75)
    """
    n, total = len(share), share.sum()
    if total == 0:
        return 0.0
    ranks = np.arange(1, n + 1)
    return float((2 * ranks - n - 1) @ np.sort(share) / (n * total))


def effective_number(share: Float[np.ndarray, "component"]) -> float:
    """1 / Σ share²: how many equally influential components would be as concentrated; 0 for none.

    >>> effective_number(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    squares = float((share**2).sum())
    return float(share.sum()) ** 2 / squares if squares else 0.0


def matches_frame(
    plan: Plan,
    similarity: Plan,
    teacher_share: Float[np.ndarray, "teacher"],
    student_share: Float[np.ndarray, "student"],
    teacher_nodes: Sequence[Node],
    student_nodes: Sequence[Node],
) -> pd.DataFrame:
    """The matched pairs, most mass first.

    Columns: ``teacher``, ``student`` (node names), ``kind`` (``head``, ``mlp``, or ``head→mlp`` and
    the like where transport had nowhere better to go), ``similarity``, ``mass``, ``teacher_share``,
    ``student_share``.
    """
    rows, columns = np.nonzero(plan > _DUST)
    order = np.argsort(-plan[rows, columns], kind="stable")
    rows, columns = rows[order], columns[order]
    kinds = [
        a.kind if a.kind == b.kind else f"{a.kind}→{b.kind}"
        for a, b in (
            (teacher_nodes[i], student_nodes[j]) for i, j in zip(rows, columns, strict=True)
        )
    ]
    return pd.DataFrame(
        {
            "teacher": [teacher_nodes[i].name for i in rows],
            "student": [student_nodes[j].name for j in columns],
            "kind": kinds,
            "similarity": similarity[rows, columns],
            "mass": plan[rows, columns],
            "teacher_share": teacher_share[rows],
            "student_share": student_share[columns],
        }
    )


def _checked(
    teacher_share: ArrayLike, student_share: ArrayLike, similarity: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p = as_shares(teacher_share, "The teacher's influence")
    q = as_shares(student_share, "The student's influence")
    s = as_matrix(similarity, "similarity")
    if s.shape != (len(p), len(q)):
        raise InputError(
            f"similarity must be {len(p)} × {len(q)} (teacher × student), not {s.shape}."
        )
    if s.min() < 0 or s.max() > 1:
        raise InputError("similarity must lie between 0 and 1.")
    return p, q, s


_Gathering = tuple[int, list[int], float, float]


def _gatherings(
    kept: Float[np.ndarray, "whole piece"],
    similarity: Float[np.ndarray, "whole piece"],
    share: Float[np.ndarray, "whole"],
    part: float,
    least: float,
) -> list[_Gathering]:
    """Rows in which two or more pieces each carry enough: (row, pieces, mass, mean similarity)."""
    found = []
    for whole, masses in enumerate(kept):
        enough = masses >= max(part * share[whole], least, _DUST)
        if enough.sum() < 2:
            continue
        pieces = [int(j) for j in np.argsort(-masses, kind="stable") if enough[j]]
        mass = float(masses[pieces].sum())
        mean = float(masses[pieces] @ similarity[whole, pieces]) / mass
        found.append((whole, pieces, mass, mean))
    return sorted(found, key=lambda gathering: -gathering[2])


def _named(
    found: list[_Gathering], wholes: list[str], pieces: list[str], columns: list[str]
) -> pd.DataFrame:
    rows = [(wholes[i], tuple(pieces[j] for j in js), mass, mean) for i, js, mass, mean in found]
    return pd.DataFrame(rows, columns=[*columns, "mass", "similarity"])
