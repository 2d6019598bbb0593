"""Similarity of heads by what they attend to.

`pattern_similarity` is the default's part: with ā^h_g the attention pattern of head h averaged over
the prompts of group g (one template, one length), and v_g the group's share of the prompts:

    m_g = ½ (mean over teacher heads of ā_g + mean over student heads of ā_g)
    S_ij = max(0, Σ_g v_g ⟨ā^i_g − m_g, ā^j_g − m_g⟩ / (‖·‖_i ‖·‖_j)),  ‖·‖² = Σ_g v_g ‖ā_g − m_g‖²

The same m is taken from both sides: two heads with equal patterns stay equal whatever other heads
their models have, so splitting or merging heads changes nothing. With m = 0 it is the raw cosine.
`js_similarity` compares the rows of ā_g as distributions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Real
from scipy.special import rel_entr
from torch import Tensor

from circuitkd.circuits.activations import Components
from circuitkd.errors import InputError

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
    teacher: Components,
    student: Components,
    weights: Real[np.ndarray, "draw prompt"],
    *,
    common: bool = True,
) -> tuple[Float[np.ndarray, "teacher student"], Float[np.ndarray, "draw teacher student"]]:
    """The cosine of all pairs of heads: with every prompt once, and for each draw.

    ``common``: subtract the common pattern; without it this is the raw cosine.
    """
    n_prompts = sum(len(group) for group in teacher.group_prompts)
    once = torch.ones(1, n_prompts, dtype=torch.float64)
    value = _cosine(teacher, student, once, common)[0].numpy()
    counts = torch.from_numpy(np.asarray(weights, dtype=np.float32))
    widest = max(left[0].numel() + right[0].numel() for left, right in _groups(teacher, student))
    chunks = counts.split(max(1, _AVERAGE_CELLS // widest))
    draws = [_cosine(teacher, student, chunk, common).numpy() for chunk in chunks if len(chunk)]
    return value, np.concatenate(draws) if draws else np.zeros((0, *value.shape), np.float32)


def _cosine(
    teacher: Components, student: Components, weights: Float[Tensor, "draw prompt"], common: bool
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
        share = weights[:, members] / weights.sum(1, keepdim=True)
        _add_group(sums, share, *patterns, common=common)
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
    *,
    common: bool,
) -> None:
    share = weights.sum(1)
    # A group that a draw leaves out has share 0, and must not divide 0 by 0.
    within = weights / share.clamp(min=1e-30)[:, None]
    left, right = _averages(within, teacher), _averages(within, student)
    middle = (left.mean(1, keepdim=True) + right.mean(1, keepdim=True)) / 2
    sums.whole += share * middle[:, 0].square().sum(1)
    if common:
        left, right = left - middle, right - middle
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


def js_similarity(teacher: Components, student: Components) -> Float[np.ndarray, "teacher student"]:
    """1 − Jensen–Shannon divergence of all pairs of heads; groups count by their prompts."""
    total: np.ndarray | float = 0.0
    for left, right in _groups(teacher, student):
        rows_teacher = _with_rest(left.double().mean(0).numpy())
        rows_student = _with_rest(right.double().mean(0).numpy())
        divergence = [_divergence(head, rows_student).mean(-1) for head in rows_teacher]
        total = total + len(left) * (1 - np.stack(divergence))
    return np.asarray(total) / sum(len(left) for left in teacher.patterns)


def one_minus_js(x: Float[np.ndarray, "query key"], y: Float[np.ndarray, "query key"]) -> float:
    """1 − the Jensen–Shannon divergence, in bits, of each query's attention, averaged."""
    return float(1 - _divergence(_with_rest(x), _with_rest(y)).mean())


def _with_rest(pattern: Float[np.ndarray, "*head query key"]) -> Float[np.ndarray, "*head query _"]:
    """With one more key for the attention that goes to tokens that are not compared."""
    total = pattern.sum(-1, keepdims=True)
    if pattern.min() < 0 or total.max() > 1 + 1e-3:
        raise InputError(
            "attention_js compares attention: rows that are not negative and sum to 1, or to less "
            "where some keys are left out."
        )
    return np.concatenate([pattern, np.clip(1 - total, 0, 1)], axis=-1)


def _divergence(
    x: Float[np.ndarray, "query key"], y: Float[np.ndarray, "*head query key"]
) -> Float[np.ndarray, "*head query"]:
    middle = (x + y) / 2
    bits = (rel_entr(x, middle) + rel_entr(y, middle)).sum(-1) / (2 * np.log(2))
    return np.clip(bits, 0, 1)


def raw_cosine(x: Float[np.ndarray, "query key"], y: Float[np.ndarray, "query key"]) -> float:
    """The cosine of two matrices as vectors; 0 where one of them is 0."""
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float(np.clip((x * y).sum() / size, -1, 1)) if size > 0 else 0.0


def deviation_cosine(x: Float[np.ndarray, "query key"], y: Float[np.ndarray, "query key"]) -> float:
    """The cosine of two patterns minus uniform attention over the keys a query may look at.

    A key that is exactly 0 in both patterns is one that no head may look at.
    """
    allowed = (x != 0) | (y != 0)
    n_keys = np.maximum(allowed.sum(1, keepdims=True), 1)

    def deviation(pattern: np.ndarray) -> np.ndarray:
        moved = np.where(allowed, pattern - pattern.sum(1, keepdims=True) / n_keys, 0)
        return moved if np.abs(moved).max() > 1e-9 * np.abs(pattern).max() else moved * 0

    return raw_cosine(deviation(x), deviation(y))


def circuit_correlation(
    x: Float[np.ndarray, "query key"], y: Float[np.ndarray, "query key"]
) -> float:
    """The correlation of two score matrices after every row's mean is taken away."""
    return float(circuit_correlations(x[None], y[None])[0, 0])


def circuit_correlations(
    teacher: Float[np.ndarray, "teacher row column"],
    student: Float[np.ndarray, "student row column"],
) -> Float[np.ndarray, "teacher student"]:
    """The same for all pairs of heads, in [-1, 1]."""
    return np.clip(_unit_deviation(teacher) @ _unit_deviation(student).T, -1, 1)


def _unit_deviation(
    scores: Float[np.ndarray, "head row column"],
) -> Float[np.ndarray, "head cell"]:
    moved = (scores - scores.mean(-1, keepdims=True)).reshape(len(scores), -1)
    size = np.linalg.norm(moved, axis=1, keepdims=True)
    # Only rounding is left of a row that is the same for all columns.
    noise = 1e-6 * np.linalg.norm(scores.reshape(len(scores), -1), axis=1, keepdims=True)
    return np.divide(moved, size, out=np.zeros_like(moved), where=size > noise)


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
