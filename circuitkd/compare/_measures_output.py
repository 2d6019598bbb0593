"""Measures on outputs: what is done once to each array, and what to each pair of prepared arrays.

Preparing commutes with reordering rows, so that a chance level (rows of one side shuffled) needs no
second preparation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from jaxtyping import Float

from circuitkd.errors import InputError

ANGLE_DIRECTIONS = 10
"""Principal directions of each side that `principal_angles` compares, at most."""
SVCCA_VARIANCE = 0.99
"""Part of the variance that `svcca` keeps (Raghu et al. 2017)."""

_RANK = 1e-6
"""Singular values below this part of the largest are rounding of float32 activations."""

Rows = Float[np.ndarray, "row _"]


@dataclass(frozen=True)
class OutputMeasure:
    """A similarity in [0, 1] of two arrays whose rows belong together.

    ``compare`` takes two prepared arrays. Arrays are compared as they are: centring is up to the
    caller.
    """

    prepare: Callable[[Rows], Rows]
    compare: Callable[[Rows, Rows], float]

    def __call__(self, x: Rows, y: Rows) -> float:
        return self.compare(self.prepare(x), self.prepare(y))


def _unit(x: Rows) -> Rows:
    size = np.linalg.norm(x)
    return x / size if size > 0 else x


def _squared_nuclear_norm(x: Rows, y: Rows) -> float:
    return float(min(1.0, np.linalg.svd(x.T @ y, compute_uv=False).sum() ** 2))


def _top_span(x: Rows) -> Rows:
    return _left_directions(x)[0][:, :ANGLE_DIRECTIONS]


def _mean_squared_cosine(x: Rows, y: Rows) -> float:
    k = min(x.shape[1], y.shape[1])
    # The sum of cos² over principal angles is ‖UᵀV‖²: it needs no singular values.
    return float(min(1.0, ((x[:, :k].T @ y[:, :k]) ** 2).sum() / k)) if k else 0.0


def _most_variance(x: Rows) -> Rows:
    directions, values = _left_directions(x)
    if len(values) == 0:
        return directions
    explained = np.cumsum(values**2)
    return directions[:, : np.searchsorted(explained, SVCCA_VARIANCE * explained[-1]) + 1]


def _mean_canonical_correlation(x: Rows, y: Rows) -> float:
    widths, rows = (x.shape[1], y.shape[1]), len(x)
    if sum(widths) >= rows:
        raise InputError(
            f"SVCCA of {widths[0]} and {widths[1]} directions needs more than {sum(widths)} rows, "
            f"not {rows}: with fewer, unrelated arrays correlate perfectly. Take more prompts."
        )
    if min(widths) == 0:
        return 0.0
    # Left singular vectors are white, so no covariance has to be inverted.
    cosines = np.linalg.svd(x.T @ y, compute_uv=False)
    return float(np.clip(cosines, 0, 1).mean())


procrustes = OutputMeasure(_unit, _squared_nuclear_norm)
principal_angles = OutputMeasure(_top_span, _mean_squared_cosine)
svcca = OutputMeasure(_most_variance, _mean_canonical_correlation)


def centred(x: Rows) -> Rows:
    """``x`` minus its mean row; exactly 0 where only rounding is left of it."""
    moved = x - x.mean(0)
    noise = 1e-12 * np.abs(x).max()
    return moved if np.sqrt((moved**2).mean()) > noise else np.zeros_like(x)


def debiased_cka(x: Rows, y: Rows) -> float:
    """CKA of two arrays with the unbiased estimate of HSIC; see `similarity`."""
    if len(x) < 4:
        raise InputError(f"Debiased CKA needs at least 4 rows, not {len(x)}.")
    # HSIC₁ does not change under translation; centring and scaling only spare rounding errors.
    x, y = _standardised(x), _standardised(y)
    own = _hsic(x, x) * _hsic(y, y)
    # A constant array resembles nothing; nor does one whose debiased size is not positive.
    return float(np.clip(_hsic(x, y) / np.sqrt(own), -1, 1)) if own > 0 else 0.0


def _standardised(x: Rows) -> Rows:
    moved = centred(x)
    size = np.sqrt((moved**2).mean())
    return moved / size if size > 0 else moved


def _hsic(x: Float[np.ndarray, "row left"], y: Float[np.ndarray, "row right"]) -> float:
    """HSIC₁ of XXᵀ and YYᵀ from d × d products only."""
    n = len(x)
    diagonal_x, diagonal_y = (x**2).sum(1), (y**2).sum(1)
    trace = ((x.T @ y) ** 2).sum() - diagonal_x @ diagonal_y
    rows_x, rows_y = x @ x.sum(0) - diagonal_x, y @ y.sum(0) - diagonal_y
    totals = rows_x.sum() * rows_y.sum() / ((n - 1) * (n - 2))
    return float((trace + totals - 2 * (rows_x @ rows_y) / (n - 2)) / (n * (n - 3)))


def _left_directions(
    x: Float[np.ndarray, "row feature"],
) -> tuple[Float[np.ndarray, "row direction"], Float[np.ndarray, "direction"]]:
    """Left singular vectors and singular values, without those that are rounding."""
    vectors, values, _ = scipy.linalg.svd(x, full_matrices=False, check_finite=False)
    kept = values > _RANK * values[0]
    return vectors[:, kept], values[kept]
