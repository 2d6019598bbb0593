"""Statistics of ablation drops, on plain arrays, and two ways to be unsure of them.

A *drop* is what ablating one component takes from the metric, in percent of the clean metric,
clamped to [0, 100]. All statistics weigh heads and MLPs alike.

*Over components*: the published intervals (Distilled Circuits, NumPy's ``default_rng(42)``, 10,000
draws), reproduced to the digit. They take the components of a model for a random sample of
components, so they say how much a mean owes to a few of them, not what other prompts would give.

*Over prompts*: the basic bootstrap (Davison and Hinkley 1997), [2θ − q97.5, 2θ − q2.5]. The clamp
turns noise of either sign into drops, so resampled means lie above the sample's; a percentile
interval would add that bias to the point's own. With most components idle and 50 noisy prompts the
percentile interval was seen to hold the truth in 20 % of trials, and the basic one in 84 %.
"""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from circuitkd.errors import InputError

Statistic = Callable[[Float[np.ndarray, "*draw node"]], Float[np.ndarray, "*draw"]]

COMPONENT_DRAWS = 10_000
COMPONENT_SEED = 42
LIMIT, THRESHOLD, ALPHA = 100.0, 20.0, 1.0
_WORST = 0.05
_CHUNK = 500  # draws held at once


def clamped_drops(retained_pct: ArrayLike) -> Float[np.ndarray, "*axes"]:
    """100 − retained percentage, clamped to [0, 100].

    >>> clamped_drops([100.5, 80.0, -31.4])
    array([  0.,  20., 100.])
    """
    return 100 - np.clip(np.asarray(retained_pct, dtype=float), 0, 100)


def mean_drop(drops: Float[np.ndarray, "*draw node"]) -> Float[np.ndarray, "*draw"]:
    """The mean over components."""
    return np.asarray(drops.mean(-1))


def total_drop(drops: Float[np.ndarray, "*draw node"]) -> Float[np.ndarray, "*draw"]:
    """The sum over components, which does not fall because a model has more of them.

    A student with half the components whose work is spread as before has twice the mean drop and
    the same total.
    """
    return np.asarray(drops.sum(-1))


def worst_drop(drops: Float[np.ndarray, "*draw node"]) -> Float[np.ndarray, "*draw"]:
    """The mean of the worst 5 % of the components, at least one."""
    count = int(np.ceil(_WORST * drops.shape[-1]))
    return np.asarray(np.sort(drops, axis=-1)[..., -count:].mean(-1))


def gini(values: Float[np.ndarray, "*draw node"]) -> Float[np.ndarray, "*draw"]:
    """Gini coefficient of values that are not negative: 0 all alike, near 1 one has all.

    0 where all values are 0.

    >>> gini(np.array([0.0, 0.0, 0.0, 1.0])), gini(np.array([2.0, 2.0]))
    (array(0.75), array(0.))
    """
    ordered = np.sort(values, axis=-1)
    n = values.shape[-1]
    ranks = 2 * np.arange(1, n + 1) - n - 1
    total = np.asarray(values.sum(-1))
    share = np.divide(ordered @ ranks, n * total, out=np.zeros_like(total), where=total > 0)
    return np.asarray(share)


def severity_tail(
    drops: Float[np.ndarray, "*draw node"],
    *,
    limit: float = LIMIT,
    threshold: float = THRESHOLD,
    alpha: float = ALPHA,
) -> Float[np.ndarray, "*draw"]:
    """Severity of the worst drops: mean over components of max(0, (min(L, m) − T) / (L − T))^α.

    In [0, 1]: 0 where no drop exceeds ``threshold`` T percent, 1 where all reach ``limit`` L.

    >>> severity_tail(np.array([10.0, 60.0, 120.0, 0.0]))
    array(0.375)
    """
    excess = (np.minimum(limit, drops) - threshold) / (limit - threshold)
    return np.asarray((np.maximum(0, excess) ** alpha).mean(-1))


def drop_statistics(
    limit: float = LIMIT, threshold: float = THRESHOLD, alpha: float = ALPHA
) -> dict[str, Statistic]:
    """The statistics of drops in percent, by name."""
    if not 0 <= threshold < limit or alpha <= 0:
        raise InputError(
            f"Severity needs 0 ≤ threshold < limit and alpha > 0, not threshold={threshold}, "
            f"limit={limit}, alpha={alpha}."
        )

    def severity(drops: Float[np.ndarray, "*draw node"]) -> Float[np.ndarray, "*draw"]:
        return severity_tail(drops, limit=limit, threshold=threshold, alpha=alpha)

    return {
        "mean_drop_pct": mean_drop,
        "total_drop_pct": total_drop,
        "worst_drop_pct": worst_drop,
        "severity": severity,
        "gini": gini,
    }


def component_interval(
    drops: Float[np.ndarray, "node"], statistics: Mapping[str, Statistic]
) -> dict[str, tuple[float, float]]:
    """95 % percentile interval over components of each statistic, as published.

    Drops in published order: heads by layer and number, then MLPs.

    >>> low, high = component_interval(np.array([0.0, 0.0, 30.0]), {"mean": mean_drop})["mean"]
    >>> low, high
    (0.0, 30.0)
    """
    rng, n = np.random.default_rng(COMPONENT_SEED), len(drops)
    found: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    for _ in range(COMPONENT_DRAWS // _CHUNK):
        drawn = drops[rng.integers(0, n, size=(_CHUNK, n))]
        for name, statistic in statistics.items():
            found[name].append(statistic(drawn))
    return {name: _percentiles(np.concatenate(parts)) for name, parts in found.items()}


def component_difference(
    teacher: Float[np.ndarray, "left"],
    student: Float[np.ndarray, "right"],
    statistics: Mapping[str, Statistic],
) -> dict[str, tuple[float, float, float]]:
    """Mean and 95 % interval of student − teacher over resampled components, as published.

    One generator serves both: in every draw the teacher's components are drawn before the
    student's. The mean of these differences, not the difference of the means, is what the
    published code divides by the compression ratio.
    """
    rng = np.random.default_rng(COMPONENT_SEED)
    n, m = len(teacher), len(student)
    found: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    for _ in range(COMPONENT_DRAWS // _CHUNK):
        pairs = [(rng.integers(0, n, size=n), rng.integers(0, m, size=m)) for _ in range(_CHUNK)]
        left, right = (np.array(side) for side in zip(*pairs, strict=True))
        for name, statistic in statistics.items():
            found[name].append(statistic(student[right]) - statistic(teacher[left]))
    joined = {name: np.concatenate(parts) for name, parts in found.items()}
    return {name: (float(d.mean()), *_percentiles(d)) for name, d in joined.items()}


def basic_interval(
    value: float, draws: Float[np.ndarray, "draw"], low: float = -np.inf, high: float = np.inf
) -> tuple[float, float]:
    """95 % basic bootstrap interval of ``value``, within the range that is possible.

    Draws without a value (NaN) are left out.

    >>> basic_interval(1.0, np.array([1.0, 1.0, 1.0]))
    (1.0, 1.0)
    """
    usable = draws[np.isfinite(draws)]
    if not len(usable) or not np.isfinite(value):
        return np.nan, np.nan
    ends = 2 * value - np.quantile(usable, [0.975, 0.025])
    return float(np.clip(ends[0], low, high)), float(np.clip(ends[1], low, high))


def _percentiles(draws: Float[np.ndarray, "draw"]) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
