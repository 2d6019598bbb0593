"""What every sender writes to the residual stream, and what is put in its place.

All differences of one slice of prompts are held at once, ``[batch sender pos d_model]``; the
slices are cut so that this stays within a fixed amount of memory whatever the number of prompts.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from circuitkd.circuits.edges import layout_of
from circuitkd.circuits.engine import Observed, Replay
from circuitkd.circuits.influence import observe_in_slices
from circuitkd.errors import InputError
from circuitkd.prompts import PromptGroup, Prompts

Ablation = Literal["corrupted", "mean", "zero"]
ABLATIONS: tuple[Ablation, ...] = ("corrupted", "mean", "zero")

_CPU_BYTES, _GPU_BYTES = 2**27, 2**30  # for the differences of one slice


@dataclass(frozen=True)
class Written:
    """The outputs of all senders. Heads as z, before W_O: that is narrower."""

    embed: Float[Tensor, "batch pos d_model"]
    z: tuple[Float[Tensor, "batch pos head d_head"], ...]
    mlp: tuple[Float[Tensor, "batch pos d_model"], ...]


@dataclass(frozen=True)
class Trace:
    """One run: its embedding and what each block did."""

    embed: Float[Tensor, "batch pos d_model"]
    layers: tuple[Observed, ...]

    @property
    def written(self) -> Written:
        return Written(
            self.embed,
            tuple(seen.z for seen in self.layers),
            tuple(seen.mlp for seen in self.layers),
        )

    def entering(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters a block; after the last block, the final one."""
        return self.embed if layer == 0 else self.layers[layer - 1].post


def trace(replay: Replay, tokens: Int[Tensor, "batch pos"], rows: int) -> Trace:
    """Run the network block by block and keep what its parts did."""
    embed = replay.embed(tokens)
    stream, layers = embed, []
    for layer in range(replay.n_layers):
        layers.append(observe_in_slices(replay, layer, stream, rows))
        stream = layers[-1].post
    return Trace(embed, tuple(layers))


class Replacements:
    """What is put in the place of each sender's output, for any slice of a group's prompts.

    ``corrupted``: its output on the paired corrupted prompt; ``mean``: its mean over the group's
    ``means``, position by position; ``zero``: zero. Heads are replaced before W_O, so the bias of
    the attention stays.
    """

    def __init__(self, replay: Replay, group: PromptGroup, ablation: Ablation, rows: int) -> None:
        self._replay, self._group, self._rows = replay, group, rows
        self._ablation = ablation
        self._mean = _mean(replay, group, rows) if ablation == "mean" else None

    def __call__(self, prompts: slice, clean: Written) -> Written:
        if self._mean is not None:
            return self._mean
        if self._ablation == "corrupted":
            return trace(self._replay, self._group.corrupted[prompts], self._rows).written
        return Written(
            torch.zeros_like(clean.embed),
            tuple(torch.zeros_like(z) for z in clean.z),
            tuple(torch.zeros_like(mlp) for mlp in clean.mlp),
        )


def _mean(replay: Replay, group: PromptGroup, rows: int) -> Written:
    embed = replay.embed(group.means)
    stream, z, mlp = embed, [], []
    for layer in range(replay.n_layers):
        seen = observe_in_slices(replay, layer, stream, rows)
        z.append(_average(seen.z))
        mlp.append(_average(seen.mlp))
        stream = seen.post
    return Written(_average(embed), tuple(z), tuple(mlp))


def _average(values: Float[Tensor, "batch *rest"]) -> Float[Tensor, "one *rest"]:
    return values.float().mean(0, keepdim=True).to(values.dtype)


def sender_changes(
    replay: Replay, clean: Written, other: Written
) -> Float[Tensor, "batch sender pos d_model"]:
    """Replaced minus clean output of every sender, in the order of ``Layout.senders``."""
    batch, n_pos, width = clean.embed.shape
    n_heads = clean.z[0].shape[2]
    n_senders = 1 + len(clean.z) * (n_heads + 1)
    changes = clean.embed.new_empty(batch, n_senders, n_pos, width)
    changes[:, 0] = other.embed - clean.embed
    for layer in range(len(clean.z)):
        first = 1 + layer * (n_heads + 1)
        writes = replay.head_writes(layer, other.z[layer] - clean.z[layer])
        changes[:, first : first + n_heads] = rearrange(writes, "b pos head d -> b head pos d")
        changes[:, first + n_heads] = other.mlp[layer] - clean.mlp[layer]
    return changes


def prompt_slices(replay: Replay, n_prompts: int, n_pos: int, rows: int) -> list[slice]:
    """Slices of at most ``rows`` prompts whose sender differences fit into memory.

    Slices smaller than ``rows`` are cut so that several of them nearly fill it: path patching then
    runs several edges of a slice at once.
    """
    cfg = replay.model.cfg
    size = replay.W_O(0).element_size()
    each = len(layout_of(replay.model).senders) * n_pos * cfg.d_model * size
    budget = _CPU_BYTES if replay.device.type == "cpu" else _GPU_BYTES
    most = min(rows, max(1, budget // each))
    return even_slices(n_prompts, rows // -(-rows // most))


def even_slices(n: int, most: int) -> list[slice]:
    """As few slices as hold at most ``most`` each, of nearly equal size."""
    count = -(-n // most)
    ends = [n * part // count for part in range(count + 1)] if n else [0]
    return [slice(first, last) for first, last in pairwise(ends)]


def check_arguments(prompts: Prompts, ablation: str, batch_size: int | None) -> Ablation:
    """The ablation, where all three arguments can be used; ``InputError`` where not."""
    if ablation not in ABLATIONS:
        raise InputError(f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}.")
    if len(prompts) == 0:
        raise InputError("There are no prompts to measure on.")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"The batch size must be at least 1, not {batch_size}.")
    return next(known for known in ABLATIONS if known == ablation)
