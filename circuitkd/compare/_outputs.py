"""The output part of the default similarity, for all pairs of components and many weightings.

The sums over prompts p < q of w_p w_q M^{ij}_{pq} (see `similarity`; both are symmetric) are taken
block by block: the Gram blocks of all components between prompt p and a run of prompts q, one
batched product over the blocks' cells for M of all pairs, and one product
``[draw, pq] @ [pq, pair]`` for all bootstrap draws. Memory is bounded by the run's length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

_GRAM_CELLS = 4_000_000
"""Gram cells held at once; 16 MB in float32, small enough for a CPU's memory bandwidth."""
_PAIR_ROWS = 512
"""Prompt pairs whose M are collected before they are weighted in one product."""
_NOTHING = 1e-12
"""Mean self-similarity (of components scaled to mean square 1) below which nothing varies."""


@dataclass(frozen=True)
class _Rows:
    """Prompts with equally many rows; the outputs of all components of one side at a time."""

    prompts: Int[Tensor, "prompt"]
    teacher: Float[Tensor, "teacher prompt row teacher_feature"]
    student: Float[Tensor, "student prompt row student_feature"]


def output_similarity(
    teacher: Sequence[Float[Tensor, "row _"]],
    student: Sequence[Float[Tensor, "row _"]],
    row_prompt: Int[Tensor, "row"],
    weights: Real[np.ndarray, "draw prompt"],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Float[np.ndarray, "teacher student"], Float[np.ndarray, "draw teacher student"]]:
    """CKA, debiased by prompts, of all pairs: with every prompt once, and for each draw."""
    classes = _row_classes(_scaled_stack(teacher), _scaled_stack(student), row_prompt)
    n_teacher, n_student = len(teacher), len(student)
    n_columns = n_teacher * n_student + n_teacher + n_student
    counts = torch.from_numpy(np.asarray(weights, dtype=np.float32))
    total = torch.zeros(1, n_columns, dtype=torch.float64)
    draws = torch.zeros(len(counts), n_columns)
    for left, right, m in _batches(_pair_sums(classes, progress), _PAIR_ROWS):
        total += m.sum(0, dtype=torch.float64)
        if len(counts):
            draws.addmm_(counts[:, left] * counts[:, right], m)
    shape = (n_teacher, n_student)
    return (
        _normalised(total, shape)[0].numpy(),
        _normalised(draws, shape).numpy(),
    )


def _scaled_stack(
    features: Sequence[Float[Tensor, "row _"]],
) -> Float[Tensor, "component row feature"]:
    """Components at mean square 1, padded with zeros to one width (inner products do not change).

    CKA ignores scale; scaling first keeps products of four activations inside float32.
    """
    width = max(x.shape[1] for x in features)
    stack = torch.zeros(len(features), len(features[0]), width)
    for scaled, x in zip(stack, features, strict=True):
        size = x.double().square().sum(1).mean().sqrt()
        if size > 0:
            scaled[:, : x.shape[1]] = x.double() / size
    return stack


def _row_classes(teacher: Tensor, student: Tensor, row_prompt: Int[Tensor, "row"]) -> list[_Rows]:
    prompts, counts = torch.unique(row_prompt, return_counts=True)
    classes = []
    for count in counts.unique().tolist():
        members = prompts[counts == count]
        places = torch.stack([(row_prompt == p).nonzero()[:, 0] for p in members])
        classes.append(_Rows(members, teacher[:, places], student[:, places]))
    return classes


def _pair_sums(
    classes: Sequence[_Rows], progress: Callable[[int, int], None] | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For runs of prompt pairs p < q: p, q, and ``[pair, M^{ij} | M^{ii} | M^{jj}]``."""
    done, n_prompts = 0, sum(len(rows.prompts) for rows in classes)
    for k, own in enumerate(classes):
        for place, p in enumerate(own.prompts):
            for other, start in [(own, place + 1), *((later, 0) for later in classes[k + 1 :])]:
                cells = own.teacher.shape[2] * other.teacher.shape[2]
                step = max(1, _GRAM_CELLS // (cells * (len(own.teacher) + len(own.student))))
                for first in range(start, len(other.prompts), step):
                    run = slice(first, first + step)
                    q = other.prompts[run]
                    left = _gram_blocks(own.teacher[:, place], other.teacher[:, run])
                    right = _gram_blocks(own.student[:, place], other.student[:, run])
                    sums = torch.cat(
                        [
                            (left @ right.mT).flatten(1),
                            left.square().sum(2),
                            right.square().sum(2),
                        ],
                        dim=1,
                    )
                    yield p.expand(len(q)), q, sums
            done += 1
            if progress is not None:
                progress(done, n_prompts)


def _gram_blocks(
    one: Float[Tensor, "component row feature"],
    many: Float[Tensor, "component prompt other feature"],
) -> Float[Tensor, "prompt component cell"]:
    grams = one @ many.flatten(1, 2).mT
    blocks = grams.unflatten(2, many.shape[1:3])
    return blocks.permute(2, 0, 1, 3).flatten(2)


def _batches(
    runs: Iterator[tuple[Tensor, Tensor, Tensor]], size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    for run in runs:
        held.append(run)
        if sum(len(p) for p, _, _ in held) >= size:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(runs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    left, right, sums = zip(*runs, strict=True)
    return torch.cat(left), torch.cat(right), torch.cat(sums)


def _normalised(
    sums: Float[Tensor, "draw column"], shape: tuple[int, int]
) -> Float[Tensor, "draw teacher student"]:
    n_teacher, n_student = shape
    cross, own_teacher, own_student = sums.split(
        [n_teacher * n_student, n_teacher, n_student], dim=1
    )
    cross = cross.unflatten(1, shape)
    varies = (own_teacher > _NOTHING)[:, :, None] & (own_student > _NOTHING)[:, None, :]
    size = (own_teacher.sqrt()[:, :, None] * own_student.sqrt()[:, None, :]).clamp(min=_NOTHING)
    return torch.where(varies, cross / size, 0).clamp(0, 1)
