"""Random rotations, bases and orders: what a random description of a network is made of."""

import torch
from jaxtyping import Float
from torch import Tensor

from circuitkd.distill._weights import Weights

_SCALES = (0.5, 2.0)


def random_rotation(
    width: int, generator: torch.Generator, *, fix_ones: bool = False
) -> Float[Tensor, "width width"]:
    """A random orthogonal matrix (float64), uniform over all, or over those with Q 1 = 1.

    >>> Q = random_rotation(5, torch.Generator().manual_seed(0), fix_ones=True)
    >>> torch.allclose(Q @ Q.T, torch.eye(5).double()), torch.allclose(Q.sum(1), Q.sum(0))
    (True, True)
    """
    if not fix_ones:
        q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
        return q * r.diagonal().sign()  # without the signs not all would be equally likely
    ones = torch.ones(width, 1, dtype=torch.float64)
    others = torch.eye(width, dtype=torch.float64)[:, 1:]
    frame = torch.linalg.qr(torch.cat([ones, others], 1))[0]
    inner = torch.block_diag(
        torch.ones(1, 1, dtype=torch.float64), random_rotation(width - 1, generator)
    )
    return frame @ inner @ frame.T


def value_basis(
    weights: Weights, generator: torch.Generator
) -> Float[Tensor, "kv_head d_head d_head"]:
    return torch.stack([_basis(weights.d_head, generator) for _ in range(weights.n_kv_heads)])


def query_basis(
    weights: Weights, generator: torch.Generator
) -> Float[Tensor, "kv_head d_head d_head"]:
    if not weights.rotary:
        return value_basis(weights, generator)
    shape = (weights.n_kv_heads, weights.d_head // 2)
    angle = 2 * torch.pi * torch.rand(shape, generator=generator, dtype=torch.float64)
    scale = _scales(shape, generator)
    cos, sin = (scale * angle.cos()).diag_embed(), (scale * angle.sin()).diag_embed()
    return torch.cat([torch.cat([cos, sin], 2), torch.cat([-sin, cos], 2)], 1)


def _basis(width: int, generator: torch.Generator) -> Float[Tensor, "width width"]:
    left, right = random_rotation(width, generator), random_rotation(width, generator)
    return left @ _scales((width,), generator).diag() @ right


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    low, high = (torch.tensor(end, dtype=torch.float64).log() for end in _SCALES)
    return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).exp()


def random_order(length: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randperm(length, generator=generator).tolist())


def head_order(weights: Weights, generator: torch.Generator) -> tuple[int, ...]:
    size = weights.n_heads // weights.n_kv_heads
    return tuple(
        group * size + place
        for group in random_order(weights.n_kv_heads, generator)
        for place in random_order(size, generator)
    )
