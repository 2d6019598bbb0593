"""Rank correlations of the predictors with the target over students, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.stats import rankdata

from circuitkd.metrics import percentile_interval

TARGETS = {
    "agreement": "same answer as the teacher (share of prompts)",
    "correlation": "correlation of the logit difference with the teacher's",
}

PREDICTORS = {
    "transport": "transport alignment",
    "calibrated": "transport alignment, calibrated",
    "paper": "paper's alignment",
    "gain": "Δ performance (student − teacher)",
    "cka": "CKA, final residual stream, all positions",
    "cka_end": "CKA, final residual stream, answer position",
    "signed": "signed transport",
    "weighted_argmax": "weighted argmax",
    "null_z": "transport, z against its null",
    "agreement_in": "same answer in distribution",
}
"""Column -> what it is. All are turned so that a good predictor correlates positively."""

COMPETENT = 0.9
LEAST_STUDENTS = 5
DRAWS = 2000


@dataclass(frozen=True)
class Rank:
    """A Spearman correlation over students with its 95 % bootstrap interval.

    ``behind`` = this correlation minus the transport alignment's, on the same resampled students,
    with its interval. NaN where a correlation does not exist (nothing varies).
    """

    value: float
    low: float
    high: float
    behind: float
    behind_low: float
    behind_high: float
    students: int


def spearman(
    x: Float[np.ndarray, "*draw student"], y: Float[np.ndarray, "*draw student"]
) -> Float[np.ndarray, "*draw"]:
    """Rank correlation over the last axis, ties at their mean rank; NaN where nothing varies.

    >>> float(spearman(np.array([1.0, 2, 9]), np.array([0.1, 0.2, 0.3])))
    1.0
    """
    left, right = (rankdata(values, axis=-1) for values in (x, y))
    left, right = (ranks - ranks.mean(-1, keepdims=True) for ranks in (left, right))
    size = np.sqrt((left**2).sum(-1) * (right**2).sum(-1))
    product = (left * right).sum(-1)
    return np.divide(product, size, out=np.full(np.shape(size), np.nan), where=size > 0)


def rank_correlations(
    rows: pd.DataFrame,
    target: str,
    predictors: Sequence[str] = tuple(PREDICTORS),
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Rank]:
    """Spearman's correlation of each predictor with the target.

    Args:
        rows: one row a student.
        target: column to predict.
        predictors: columns; the first is what the others are compared with.
        draws: samples of students, with replacement, behind the intervals.
        seed: of those samples.
    """
    picked = np.random.default_rng(seed).integers(len(rows), size=(draws, len(rows)))
    y = rows[target].to_numpy(dtype=float)
    columns = {name: rows[name].to_numpy(dtype=float) for name in predictors}
    # What is missing in one row would otherwise get a rank.
    kept = np.isfinite(y) & np.all([np.isfinite(x) for x in columns.values()], axis=0)
    if not kept.all():
        return rank_correlations(rows.loc[kept], target, predictors, draws=draws, seed=seed)
    values = {name: float(spearman(x, y)) for name, x in columns.items()}
    drawn = {name: spearman(x[picked], y[picked]) for name, x in columns.items()}
    first = predictors[0]
    found = {}
    for name in predictors:
        behind = _interval(drawn[name] - drawn[first])
        own = _interval(drawn[name])
        found[name] = Rank(values[name], *own, values[name] - values[first], *behind, len(rows))
    return found


def _interval(draws: Float[np.ndarray, "draw"]) -> tuple[float, float]:
    draws = draws[np.isfinite(draws)]
    if len(draws) == 0:
        return np.nan, np.nan
    low, high = percentile_interval(draws)
    return float(low), float(high)


def competent(rows: pd.DataFrame) -> pd.DataFrame:
    """The students that do the task in distribution: at least 90 % of answers right."""
    return rows.loc[rows["accuracy"] >= COMPETENT]


def subsets(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What the correlations are taken over: all students, and the competent ones."""
    return {"all": rows, "competent": competent(rows)}


def correlation_table(rows: pd.DataFrame, target: str) -> str:
    """Markdown: one line a predictor, correlations over all and over the competent students."""
    ranks = {
        name: rank_correlations(subset, target)
        for name, subset in subsets(rows).items()
        if len(subset) >= LEAST_STUDENTS
    }
    heads = ["predictor"]
    for name, found in ranks.items():
        students = next(iter(found.values())).students
        who = "all students" if name == "all" else f"{100 * COMPETENT:.0f} % right or more"
        heads += [f"Spearman ρ, {who} (n = {students})", "ρ − transport's"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for predictor, title in PREDICTORS.items():
        cells = [title]
        for found in ranks.values():
            one = found[predictor]
            cells.append(_cell(one.value, one.low, one.high))
            behind = (one.behind, one.behind_low, one.behind_high)
            cells.append("" if predictor == "transport" else _cell(*behind))
        lines.append(_line(cells))
    return "\n".join(lines)


def student_table(rows: pd.DataFrame) -> str:
    """Markdown: one line a student, best agreement first."""
    columns = {
        "student": "student",
        "accuracy": "right, in distribution",
        "agreement": "agreement, out of distribution",
        "correlation": "correlation, out of distribution",
        "transport": "transport",
        "calibrated": "calibrated",
        "paper": "paper",
        "delta_performance": "Δ performance",
        "cka": "CKA",
    }
    lines = [_line(columns.values()), _line(["---"] * len(columns))]
    for row in rows.sort_values("agreement", ascending=False).to_dict("records"):
        lines.append(_line([_short(row[name]) for name in columns]))
    return "\n".join(lines)


def as_plain_data(rows: pd.DataFrame) -> dict[str, Mapping[str, Mapping[str, object]]]:
    """Target -> which students -> predictor -> its ``Rank``, for a JSON file."""
    return {
        target: {
            name: {key: vars(rank) for key, rank in rank_correlations(subset, target).items()}
            for name, subset in subsets(rows).items()
            if len(subset) >= LEAST_STUDENTS
        }
        for target in TARGETS
    }


def _cell(value: float, low: float, high: float) -> str:
    return "–" if np.isnan(value) else f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"`{value}`"


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"
