"""Checks on the arrays that users hand to the measures."""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from circuitkd.errors import InputError


def as_matrix(values: ArrayLike | Tensor, name: str) -> Float[np.ndarray, "row column"]:
    """``values`` in float64 with two axes; raises ``InputError`` unless finite and not empty."""
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise InputError(
            f"{name} must be a matrix with rows and columns, not an array of shape {matrix.shape}."
        )
    if not np.isfinite(matrix).all():
        raise InputError(f"{name} holds NaN or infinite values; nothing can be compared with it.")
    return matrix


def as_shares(values: ArrayLike, name: str) -> Float[np.ndarray, "component"]:
    """``values`` scaled to sum 1 (float64).

    Raises ``InputError`` for values that are negative, not finite, or all zero: a model in which
    no component has any influence has no shares to compare.
    """
    influence = np.asarray(values, dtype=np.float64)
    if influence.ndim != 1 or influence.size == 0:
        raise InputError(f"{name} must be a list of numbers, not an array of {influence.shape}.")
    if not np.isfinite(influence).all() or (influence < 0).any():
        raise InputError(f"{name} must be finite and not negative.")
    largest = influence.max()
    if largest == 0:
        raise InputError(
            f"{name}: no component has any influence, so there is no circuit to compare. "
            "Check that the model reads the prompts and that the ablation changes something."
        )
    scaled = influence / largest
    return scaled / scaled.sum()
