"""What an alignment is worth: against chance, and between a floor and a ceiling.

- **Null**: influences shuffled within kind (heads among heads, MLPs among MLPs), in both models.
  Whatever an alignment has beyond it comes from the right components mattering, not from
  components being alike in general.
- **Ceiling**: the teacher against itself, influences measured on disjoint halves of the prompts
  and every component identical: what the sampling of prompts alone costs.
- **Floor**: randomly initialised students of the student's shape in its place.
- **Calibrated**: (value - floor) / (ceiling - floor); 0 for a random student, 1 for the teacher
  itself. It is not clipped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from circuitkd.circuits.influence_result import shares
from circuitkd.compare.matching import match

Score = Callable[[np.ndarray, np.ndarray, np.ndarray], float]
"""(teacher's mean effects, student's, similarity [teacher, student]) -> alignment; NaN where one of
them has no influence that counts."""

NULL_DRAWS = 1000
CEILING_SPLITS = 20


@dataclass(frozen=True)
class Null:
    """An alignment's distribution when influences are shuffled within kind.

    ``z`` = (value - mean) / sd, 0 where nothing varies; ``p`` is one-sided:
    (1 + draws that reach the value) / (1 + draws).
    """

    mean: float
    sd: float
    z: float
    p: float
    draws: int

    def __repr__(self) -> str:
        return f"null {self.mean:.3f} ± {self.sd:.3f} (z {self.z:.1f}, p {self.p:.2g})"


@dataclass(frozen=True)
class Reference:
    """Alignments in a case whose answer is known: their mean, smallest and largest."""

    value: float
    low: float
    high: float
    draws: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Reference | None":
        """Of the values that exist; ``None`` where none does."""
        found = [value for value in values if np.isfinite(value)]
        if not found:
            return None
        return cls(float(np.mean(found)), min(found), max(found), len(found))

    def __repr__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f} of {self.draws})"


def shuffled_null(
    score: Score,
    teacher_effect: Float[np.ndarray, "teacher"],
    student_effect: Float[np.ndarray, "student"],
    similarity: Float[np.ndarray, "teacher student"],
    kinds: tuple[Sequence[str], Sequence[str]],
    *,
    draws: int = NULL_DRAWS,
    seed: int = 0,
) -> Null:
    """The null distribution of an alignment, and where the alignment lies in it.

    Args:
        score: the alignment.
        teacher_effect: signed mean effect of each teacher component.
        student_effect: of each student component.
        similarity: of every pair.
        kinds: each teacher component's kind, and each student component's.
        draws: number of shuffles.
        seed: of the shuffles.

    >>> from circuitkd.compare.alignment import transport_score
    >>> effect = np.array([-0.7, -0.2, -0.1])
    >>> null = shuffled_null(transport_score, effect, effect, np.eye(3), (["head"] * 3,) * 2)
    >>> null.mean < 0.9 and null.z > 0
    True
    """
    value = score(teacher_effect, student_effect, similarity)
    rng = np.random.default_rng(seed)
    drawn = np.array(
        [
            score(
                _shuffled(teacher_effect, kinds[0], rng),
                _shuffled(student_effect, kinds[1], rng),
                similarity,
            )
            for _ in range(draws)
        ]
    )
    drawn = drawn[np.isfinite(drawn)]
    mean, sd = float(drawn.mean()), float(drawn.std(ddof=min(1, len(drawn) - 1)))
    # Equal alignments differ in their last digits, which must not decide.
    reached = int((drawn >= value - 1e-12).sum())
    z = (value - mean) / sd if sd > 1e-12 else 0.0
    return Null(mean, sd, float(z), (1 + reached) / (1 + len(drawn)), len(drawn))


def split_half_ceiling(
    score: Score,
    teacher_effects: Float[np.ndarray, "prompt teacher"],
    own_similarity: Float[np.ndarray, "teacher teacher"],
    *,
    splits: int = CEILING_SPLITS,
    seed: int = 0,
) -> Reference | None:
    """The teacher against itself, influences from disjoint random halves of the prompts.

    ``None`` where no split leaves influence in both halves.
    """
    rng = np.random.default_rng(seed)
    n = len(teacher_effects)
    values = []
    for _ in range(splits):
        order = rng.permutation(n)
        one, other = (teacher_effects[part].mean(0) for part in np.split(order, [n // 2]))
        values.append(score(one, other, own_similarity))
    return Reference.of(values)


def random_floor(
    score: Score,
    teacher_effect: Float[np.ndarray, "teacher"],
    students: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Reference | None:
    """The alignment with random students: (mean effects, similarity [teacher, student]) of each."""
    return Reference.of([score(teacher_effect, effect, own) for effect, own in students])


def chance_similarity(
    teacher_effect: Float[np.ndarray, "teacher"],
    students: Sequence[tuple[np.ndarray, np.ndarray]],
    quantile: float = 0.95,
) -> float | None:
    """The similarity that this share of the teacher's influence does not exceed when it is moved
    to random students: what a match must be more than.

    ``students`` as in ``random_floor``; ``None`` without one that has influence.
    """
    similarities, masses = [], []
    for effect, similarity in students:
        if effect.any() and teacher_effect.any():
            plan = match(shares(teacher_effect), shares(effect), similarity)
            similarities.append(similarity[plan > 0])
            masses.append(plan[plan > 0])
    if not masses:
        return None
    found, mass = np.concatenate(similarities), np.concatenate(masses)
    order = np.argsort(found)
    below = np.cumsum(mass[order]) / mass.sum()
    return float(found[order][np.searchsorted(below, quantile - 1e-12)])


def _shuffled(
    effect: Float[np.ndarray, "component"], kinds: Sequence[str], rng: np.random.Generator
) -> Float[np.ndarray, "component"]:
    mixed, names = effect.copy(), np.asarray(kinds)
    for kind in dict.fromkeys(kinds):
        places = names == kind
        mixed[places] = rng.permutation(effect[places])
    return mixed
