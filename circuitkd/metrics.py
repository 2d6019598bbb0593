"""What a model's answer is worth, in logits or probability, and how sure a mean is.

All metrics are computed in float32 from the logits at the answer position, one number a prompt;
higher is better and 0 means undecided.
"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import binomtest
from torch import Tensor

from circuitkd.errors import InputError

MetricName = Literal["logit_difference", "probability_difference"]
UNITS: dict[str, str] = {"logit_difference": "logits", "probability_difference": "probability"}


def logit_difference(
    logits: Float[Tensor, "batch vocab"],
    correct: Int[Tensor, "batch"],
    incorrect: Int[Tensor, "batch"],
) -> Float[Tensor, "batch"]:
    """logit(correct) - logit(incorrect), in logits (Wang et al. 2022).

    >>> logits = torch.tensor([[2.0, 0.5, 0.0]])
    >>> logit_difference(logits, torch.tensor([0]), torch.tensor([1]))
    tensor([1.5000])
    """
    logits = logits.float()
    rows = torch.arange(len(logits), device=logits.device)
    return logits[rows, correct] - logits[rows, incorrect]


def probability_difference(
    logits: Float[Tensor, "batch vocab"],
    candidates: Int[Tensor, "candidate"],
    valid: Bool[Tensor, "batch candidate"],
) -> Float[Tensor, "batch"]:
    """P(valid candidates) - P(other candidates), a probability in [-1, 1] (Hanna et al. 2023).

    Probabilities are over the whole vocabulary.

    >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    >>> probability_difference(logits, torch.tensor([0, 1]), torch.tensor([[True, False]]))
    tensor([0.2000])
    """
    probabilities = logits.float().softmax(-1)[:, candidates]
    return torch.where(valid, probabilities, -probabilities).sum(-1)


def accuracy(metric: Float[Tensor, "prompt"]) -> float:
    """Share of prompts whose metric is above 0, that is, the right answer wins. In [0, 1].

    >>> accuracy(torch.tensor([1.0, -1.0, 0.0, 2.0]))
    0.5
    """
    return float((metric > 0).double().mean())


def accuracy_interval(metric: Float[Tensor, "prompt"]) -> tuple[float, float]:
    """95 % Wilson interval of ``accuracy``, which does not collapse at 0 or 1.

    >>> [round(end, 2) for end in accuracy_interval(torch.ones(8))]
    [0.68, 1.0]
    """
    interval = binomtest(int((metric > 0).sum()), len(metric)).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap_weights(n: int, draws: int, seed: int) -> Int[np.ndarray, "draw sample"]:
    """How often each of ``n`` samples is in each bootstrap draw; every row sums to ``n``.

    >>> bootstrap_weights(n=4, draws=3, seed=0).sum(axis=1)
    array([4, 4, 4])
    """
    if n < 1 or draws < 1:
        raise InputError(f"A bootstrap needs samples and draws; got n={n}, draws={draws}.")
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws)


def bootstrap_means(
    values: Float[np.ndarray, "sample *column"], *, draws: int = 2000, seed: int = 0
) -> Float[np.ndarray, "draw *column"]:
    """The mean over samples, in each of ``draws`` bootstrap draws."""
    weights = bootstrap_weights(len(values), draws, seed)
    return np.tensordot(weights, np.asarray(values, dtype=float), axes=1) / len(values)


def percentile_interval(
    draws: Float[np.ndarray, "draw *column"], level: float = 0.95
) -> tuple[Float[np.ndarray, "*column"], Float[np.ndarray, "*column"]]:
    """Lower and upper end of the percentile interval that holds ``level`` of the draws."""
    tail = (1 - level) / 2
    ends = np.quantile(draws, [tail, 1 - tail], axis=0)
    return ends[:1].reshape(draws.shape[1:]), ends[1:].reshape(draws.shape[1:])


def bootstrap_interval(
    values: Float[np.ndarray, "sample"], *, draws: int = 2000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of ``values`` (Efron 1979), in their units.

    >>> low, high = bootstrap_interval(np.array([1.0, 1.0, 1.0]))
    >>> low, high
    (1.0, 1.0)
    """
    low, high = percentile_interval(bootstrap_means(values, draws=draws, seed=seed), level)
    return float(low), float(high)
