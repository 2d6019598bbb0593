"""Attention patterns layer by layer, and how much of them lies on given cells."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.circuits.influence import observe_in_slices
from circuitkd.errors import RunError


def layer_patterns(
    model: TransformerBridge, tokens: Int[Tensor, "batch pos"], batch_size: int | None = None
) -> Iterator[Float[Tensor, "batch head query key"]]:
    """The patterns of each layer in turn, float32 on the CPU."""
    replay = Replay(model, tokens)
    rows = rows_per_batch(model, tokens.shape[1], batch_size)
    stream = replay.embed(tokens)
    for layer in range(replay.n_layers):
        seen = observe_in_slices(replay, layer, stream, rows, pattern=True)
        stream = seen.post
        if seen.pattern is None:
            raise RunError(f"No attention pattern was observed in layer {layer}.")
        yield seen.pattern.float().cpu()


def uniform_pattern(n_pos: int) -> Float[Tensor, "query key"]:
    """What a head that attends to everything up to its own position alike has as pattern.

    >>> uniform_pattern(2)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    return torch.ones(n_pos, n_pos).tril() / torch.arange(1, n_pos + 1)[:, None]


def cell_attention(
    pattern: Float[Tensor, "batch head query key"], cells: Int[Tensor, "batch cell 2"]
) -> Float[Tensor, "batch head"]:
    """Mean attention over a role's cells (query position, key position), prompt by prompt.

    >>> pattern = uniform_pattern(3)[None, None]
    >>> cell_attention(pattern, torch.tensor([[[1, 0], [2, 1]]]))
    tensor([[0.4167]])
    """
    prompts = torch.arange(len(pattern))[:, None]
    return pattern[prompts, :, cells[..., 0], cells[..., 1]].mean(1)


def uniform_attention(cells: Int[Tensor, "batch cell 2"]) -> Float[Tensor, "batch"]:
    """The same for a head that attends to everything up to its own position alike."""
    return (1 / (cells[..., 0] + 1).float()).mean(1)
