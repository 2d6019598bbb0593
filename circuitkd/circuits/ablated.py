"""Runs with any set of heads and MLPs ablated at once.

An ablated head or MLP writes its replacement value wherever its output goes: its mean over other
corrupted prompts, zero, or its value on the paired corrupted prompt. Replacement values always
come from the network as it is, with nothing ablated.

Greedy pruning asks for thousands of such runs, each different from the one before in one node.
The streams of the last run are remembered, so a run starts at the first layer that differs; and as
no head of a layer reads another, the heads that a layer keeps are only added up anew.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.engine import Edit, Replay, hooked, rows_per_batch
from circuitkd.circuits.influence import ABLATIONS, observe_in_slices
from circuitkd.circuits.readout import Readout, metric_readout
from circuitkd.errors import InputError
from circuitkd.models import component_nodes_of
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts


class NodeAblator:
    """A model and prompts, to be run with some nodes kept and all others ablated.

    Promises the same numbers as one forward pass with a hook on every ablated node, to 1e-4 in
    float32. Holds the streams and head outputs of all prompts: about
    2 · prompts · positions · layers · d_model numbers.
    """

    def __init__(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        *,
        ablation: str = "mean",
        batch_size: int | None = None,
    ) -> None:
        if ablation not in ABLATIONS:
            raise InputError(
                f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}."
            )
        if len(prompts) == 0:
            raise InputError("There are no prompts to measure on.")
        if batch_size is not None and batch_size < 1:
            raise InputError(f"The batch size must be at least 1, not {batch_size}.")
        self.nodes = component_nodes_of(model)
        self.n_prompts = len(prompts)
        self._parts: list[tuple[Tensor, _AblatedSlice]] = []
        for group in prompts.groups:
            self._parts += _group_parts(model, group, prompts.metric, ablation, batch_size)

    def metric(self, kept: Iterable[Node]) -> Float[Tensor, "prompt"]:
        """The metric of each prompt, in sampling order, with all nodes but ``kept`` ablated.

        >>> import circuitkd as ckd
        >>> student = ckd.load_model("tiny-student")
        >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
        >>> runs = NodeAblator(student, prompts)
        >>> bool(runs.metric(runs.nodes).mean() > runs.metric([]).mean())
        True
        """
        kept = frozenset(kept)
        if unknown := kept - set(self.nodes):
            raise InputError(f"The model has no node {', '.join(sorted(map(str, unknown)))}.")
        values = torch.zeros(self.n_prompts)
        for index, part in self._parts:
            values[index] = part.metric(kept)
        return values


def _group_parts(
    model: TransformerBridge,
    group: PromptGroup,
    metric: str,
    ablation: str,
    batch_size: int | None,
) -> "list[tuple[Tensor, _AblatedSlice]]":
    replay = Replay(model, group.clean, group.answer)
    rows = rows_per_batch(model, group.clean.shape[1], batch_size)
    read = metric_readout(replay, group, metric)
    shared = None if ablation == "resample" else _replacements(replay, group, ablation, rows)
    parts = []
    for first in range(0, len(group.clean), rows):
        prompts = slice(first, min(first + rows, len(group.clean)))
        own = _written(replay, group.corrupted[prompts], rows) if shared is None else shared
        embed = replay.embed(group.clean[prompts])
        parts.append((group.index[prompts], _AblatedSlice(replay, embed, own, read, prompts)))
    return parts


@dataclass(frozen=True)
class _Written:
    """One layer's replacement values: what each head, and the MLP, writes when it is ablated."""

    heads: Float[Tensor, "#batch pos head d_head"]
    mlp: Float[Tensor, "#batch pos d_model"]


def _replacements(replay: Replay, group: PromptGroup, ablation: str, rows: int) -> list[_Written]:
    if ablation == "mean":
        return [
            _Written(_average(layer.heads), _average(layer.mlp))
            for layer in _written(replay, group.means, rows)
        ]
    zeros = _written(replay, group.clean[:1], rows)
    return [_Written(torch.zeros_like(w.heads), torch.zeros_like(w.mlp)) for w in zeros]


def _written(replay: Replay, tokens: Tensor, rows: int) -> list[_Written]:
    stream, layers = replay.embed(tokens), []
    for layer in range(replay.n_layers):
        seen = observe_in_slices(replay, layer, stream, rows)
        layers.append(_Written(seen.z, seen.mlp))
        stream = seen.post
    return layers


def _average(values: Float[Tensor, "batch *rest"]) -> Float[Tensor, "one *rest"]:
    return values.float().mean(0, keepdim=True).to(values.dtype)


class _AblatedSlice:
    """Some prompts of one group, and their last run."""

    def __init__(
        self,
        replay: Replay,
        embed: Float[Tensor, "batch pos d_model"],
        other: list[_Written],
        read: Readout,
        prompts: slice,
    ) -> None:
        self._replay, self._other, self._read, self._prompts = replay, other, read, prompts
        self._streams = [embed]  # what enters each layer in the last run
        self._z: list[Tensor | None] = [None] * replay.n_layers
        self._kept: frozenset[Node] | None = None

    def metric(self, kept: frozenset[Node]) -> Float[Tensor, "batch"]:
        first = self._first_difference(kept)
        self._kept = None  # not to be trusted until this run is through
        del self._streams[first + 1 :]
        self._z[first + 1 :] = [None] * (self._replay.n_layers - first - 1)
        for layer in range(first, self._replay.n_layers):
            self._streams.append(self._block(layer, self._streams[layer], kept))
        self._kept = kept
        return self._read(self._streams[-1][None, :, -1], self._prompts)[0]  # the answer's alone

    def _first_difference(self, kept: frozenset[Node]) -> int:
        """The first layer with other nodes than in the last run; ``n_layers`` where none has."""
        if self._kept is None:
            return 0
        layers = [node.layer for node in kept ^ self._kept if node.layer is not None]
        return min(layers, default=self._replay.n_layers)

    def _block(self, layer: int, pre: Tensor, kept: Collection[Node]) -> Tensor:
        """The stream after a block; after the last one, at the answer position only."""
        at = self._replay.at(layer)
        mid = self._mid(layer, pre, kept, at)
        if Node.mlp(layer) in kept:
            return self._replay.finish(layer, pre[:, at], mid)
        return self._replay.after_mlp(layer, mid, self._other[layer].mlp[:, at])

    @torch.no_grad()
    def _mid(self, layer: int, pre: Tensor, kept: Collection[Node], at: slice) -> Tensor:
        """The stream after the layer's attention, at some positions."""
        other, weights = self._other[layer].heads, self._replay.W_O(layer)
        heads = [h for h in range(other.shape[2]) if Node.attention_head(layer, h) in kept]
        if heads:
            z = other[:, at].expand(len(pre), -1, -1, -1).clone()
            z[:, :, heads] = self._heads(layer, pre)[:, at][:, :, heads]
        else:
            z = other[:, at]
        written = einsum(z, weights, "b pos head d_head, head d_head d -> b pos d")
        written = written + self._replay.attention_bias(layer)
        return self._replay.after_attention(layer, pre[:, at], written)

    def _heads(self, layer: int, pre: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        """What the layer's heads compute from what enters it, ablated or not."""
        known = self._z[layer]
        if known is None:
            known = self._z[layer] = _heads_alone(self._replay, layer, pre)
        return known


def _heads_alone(
    replay: Replay, layer: int, pre: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos head d_head"]:
    """The layer's z. Its MLP sees one position, because its output is not wanted."""
    seen: dict[str, Tensor] = {}

    def keep(z: Tensor) -> None:
        seen["z"] = z.detach()

    edits: dict[str, Edit] = {f"blocks.{layer}.attn.hook_z": keep}
    with hooked(edits | replay.short_mlp(layer), replay.model):
        replay.block(layer, pre)
    n_heads = replay.W_O(layer).shape[0]
    return seen["z"].flatten(2).unflatten(2, (n_heads, -1))
