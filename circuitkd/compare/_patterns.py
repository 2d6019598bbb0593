"""Similarity of heads by what they attend to.

With ā^h_g the attention pattern of head h averaged over the prompts of group g (one template, one
length), and v_g the group's share of the prompts:

    m_g = ½ (mean over teacher heads of ā_g + mean over student heads of ā_g)
    S_ij = max(0, Σ_g v_g ⟨ā^i_g − m_g, ā^j_g − m_g⟩ / (‖·‖_i ‖·‖_j)),  ‖·‖² = Σ_g v_g ‖ā_g − m_g‖²

The same m is taken from both sides: two heads with equal patterns stay equal whatever other heads
their models have, so splitting or merging heads changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Real
from torch import Tensor

from circuitkd.circuits.activations import Components

_AVERAGE_CELLS = 8_000_000
"""Cells of averaged patterns held at once for the draws (32 MB)."""
_SAME = 1e-6
"""A deviation from the common pattern below this part of the pattern itself is rounding."""


@dataclass
class _Sums:
    """Running sums over groups: inner products, and squares of deviations and of patterns."""

    cross: Float[Tensor, "draw teacher student"]
    teacher: Float[Tensor, "draw teacher"]
    student: Float[Tensor, "draw student"]
    whole: Float[Tensor, "draw"]


def pattern_similarity(
    teacher: Components, student: Components, weights: Real[np.ndarray, "draw prompt"]
) -> tuple[Float[np.ndarray, "teacher student"], Float[np.ndarray, "draw teacher student"]]:
    """The pattern part of all pairs of heads: with every prompt once, and for each draw."""
    n_prompts = sum(len(group) for group in teacher.group_prompts)
    once = torch.ones(1, n_prompts, dtype=torch.float64)
    value = _deviation_cosine(teacher, student, once)[0].numpy()
    counts = torch.from_numpy(np.asarray(weights, dtype=np.float32))
    widest = max(left[0].numel() + right[0].numel() for left, right in _groups(teacher, student))
    chunks = counts.split(max(1, _AVERAGE_CELLS // widest))
    draws = [_deviation_cosine(teacher, student, chunk).numpy() for chunk in chunks if len(chunk)]
    return value, np.concatenate(draws) if draws else np.zeros((0, *value.shape), np.float32)


def _deviation_cosine(
    teacher: Components, student: Components, weights: Float[Tensor, "draw prompt"]
) -> Float[Tensor, "draw teacher student"]:
    n_teacher, n_student = teacher.patterns[0].shape[1], student.patterns[0].shape[1]
    n_draws = len(weights)
    sums = _Sums(
        cross=weights.new_zeros(n_draws, n_teacher, n_student),
        teacher=weights.new_zeros(n_draws, n_teacher),
        student=weights.new_zeros(n_draws, n_student),
        whole=weights.new_zeros(n_draws),
    )
    for members, patterns in zip(teacher.group_prompts, _groups(teacher, student), strict=True):
        _add_group(sums, weights[:, members] / weights.sum(1, keepdim=True), *patterns)
    none_teacher = sums.teacher <= _SAME**2 * sums.whole[:, None]
    none_student = sums.student <= _SAME**2 * sums.whole[:, None]
    size = (sums.teacher.sqrt()[:, :, None] * sums.student.sqrt()[:, None, :]).clamp(min=1e-30)
    cosine = (sums.cross / size).clamp(0, 1)
    cosine[none_teacher[:, :, None] | none_student[:, None, :]] = 0
    cosine[none_teacher[:, :, None] & none_student[:, None, :]] = 1
    return cosine


def _add_group(
    sums: _Sums,
    weights: Float[Tensor, "draw prompt"],
    teacher: Float[Tensor, "prompt teacher query key"],
    student: Float[Tensor, "prompt student query key"],
) -> None:
    share = weights.sum(1)
    # A group that a draw leaves out has share 0, and must not divide 0 by 0.
    within = weights / share.clamp(min=1e-30)[:, None]
    left, right = _averages(within, teacher), _averages(within, student)
    common = (left.mean(1, keepdim=True) + right.mean(1, keepdim=True)) / 2
    sums.whole += share * common[:, 0].square().sum(1)
    left, right = left - common, right - common
    sums.cross += share[:, None, None] * (left @ right.mT)
    sums.teacher += share[:, None] * left.square().sum(2)
    sums.student += share[:, None] * right.square().sum(2)


def _averages(
    weights: Float[Tensor, "draw prompt"], patterns: Float[Tensor, "prompt head query key"]
) -> Float[Tensor, "draw head cell"]:
    flat = patterns.flatten(1).to(weights.dtype)
    return (weights @ flat).unflatten(1, (patterns.shape[1], -1))


def _groups(teacher: Components, student: Components) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(teacher.patterns, student.patterns, strict=True)


def mean_row_cosine(
    x: Float[np.ndarray, "*pairs query key"], y: Float[np.ndarray, "*pairs query key"]
) -> float:
    """The paper's head similarity: the cosine of each query row, averaged (a zero row counts 0)."""
    return float(np.einsum("...k,...k->...", _unit_rows(x), _unit_rows(y)).mean())


def paper_head_similarity(
    teacher: Components, student: Components
) -> Float[np.ndarray, "teacher student"]:
    """The paper's similarity of all pairs of heads; groups count by their number of prompts."""
    total: np.ndarray | float = 0.0
    for left, right in _groups(teacher, student):
        rows_teacher = _unit_rows(left.double().mean(0).numpy())
        rows_student = _unit_rows(right.double().mean(0).numpy())
        cosine = np.einsum("iqk,jqk->ij", rows_teacher, rows_student) / left.shape[2]
        total = total + len(left) * cosine
    return np.asarray(total) / sum(len(left) for left in teacher.patterns)


def _unit_rows(pattern: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(pattern, axis=-1, keepdims=True)
    return np.divide(pattern, length, out=np.zeros_like(pattern), where=length > 0)
