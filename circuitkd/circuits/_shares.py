"""Shares of the full model's metric, and when they mean something."""

import numpy as np
from jaxtyping import Float
from torch import Tensor

from circuitkd.errors import RunError
from circuitkd.metrics import bootstrap_interval, bootstrap_means, percentile_interval


def percent_of(
    values: Float[Tensor, "prompt"], full: Float[Tensor, "prompt"]
) -> tuple[float, float, float]:
    """100 · mean(values) / mean(full), with its 95 % bootstrap interval over prompts.

    Prompts are drawn together for both means. NaN where the full model does not do the task.
    """
    if not is_competent(full):
        return np.nan, np.nan, np.nan
    both = np.stack([values.double().numpy(), full.double().numpy()], axis=1)
    means = both.mean(0)
    draws = bootstrap_means(both)
    # A draw of prompts that the model fails has no share to speak of.
    usable = draws[draws[:, 1] > 0]
    low, high = percentile_interval(100 * usable[:, 0] / usable[:, 1])
    return float(100 * means[0] / means[1]), float(low), float(high)


def is_competent(full: Float[Tensor, "prompt"]) -> bool:
    """Whether the interval of the mean metric lies above 0."""
    return bootstrap_interval(full.double().numpy())[0] > 0


def require_competent(full: Float[Tensor, "prompt"], label: str) -> float:
    """The mean metric; ``RunError`` where the model does not do the task."""
    mean, (low, high) = float(full.double().mean()), bootstrap_interval(full.double().numpy())
    if not low > 0:
        raise RunError(
            f"{label} does not do this task (clean metric {mean:.3f}, interval {low:.3f} to "
            f"{high:.3f}), so shares of its metric mean nothing and nothing can be pruned by them."
        )
    return mean
