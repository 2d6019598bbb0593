"""Run the network with any set of edges patched at once."""

from collections.abc import Iterable

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._attention import LayerAttention
from circuitkd.circuits._joins import PARTS
from circuitkd.circuits._senders import (
    Ablation,
    Replacements,
    Written,
    check_arguments,
    prompt_slices,
    trace,
)
from circuitkd.circuits.edges import ATTENTION_KINDS, Edge, Layout, layout_of
from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.circuits.readout import Readout, metric_readout
from circuitkd.prompts import PromptGroup, Prompts


class EdgePatcher:
    """A model and prompts whose edges can be patched, again and again.

    Every receiver reads the sum of what its senders write. Along a patched edge that is the
    sender's replacement: its output in the corrupted run (``ablation="corrupted"``), its mean, or
    zero. Along any other edge it is the sender's output in this very run, so changes flow on. All
    edges patched is the corrupted run, none the clean run.

    The runs before are remembered: a call starts at the first layer whose edges differ from those
    of the call before it. Going through edges from the logits backward is therefore cheap.

    Memory: what changes at each sender is kept for all prompts, prompts × positions × senders ×
    d_model numbers (2.8 GB for GPT-2 small, 256 prompts of 23 tokens, float32).
    """

    def __init__(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        *,
        ablation: str = "corrupted",
        batch_size: int | None = None,
    ) -> None:
        known = check_arguments(prompts, ablation, batch_size)
        self.layout = layout_of(model)
        self.n_prompts = len(prompts)
        self._parts: list[tuple[Tensor, _PatchedSlice]] = []
        for group in prompts.groups:
            self._parts += _group_parts(model, group, prompts.metric, known, batch_size)

    def mask(self, edges: Iterable[Edge]) -> Bool[Tensor, "receiver sender"]:
        """Which edges are patched, as a matrix; rows and columns in the order of ``layout``."""
        edges = tuple(edges)
        self.layout.require(edges)
        row = {receiver: number for number, receiver in enumerate(self.layout.receivers)}
        mask = torch.zeros(len(self.layout.receivers), len(self.layout.senders), dtype=torch.bool)
        if edges:
            rows = [row[edge.receiver] for edge in edges]
            mask[rows, [self.layout.position(edge.sender) for edge in edges]] = True
        return mask

    def metric(
        self, patched: Iterable[Edge] | Bool[Tensor, "receiver sender"]
    ) -> Float[Tensor, "prompt"]:
        """The metric of each prompt, in sampling order, with these edges patched."""
        mask = patched if isinstance(patched, Tensor) else self.mask(patched)
        values = torch.zeros(self.n_prompts)
        for index, part in self._parts:
            values[index] = part.metric(mask)
        return values


def patched_run(
    model: TransformerBridge,
    prompts: Prompts,
    edges: Iterable[Edge | str],
    *,
    ablation: str = "corrupted",
    batch_size: int | None = None,
) -> Float[Tensor, "prompt"]:
    """The metric of each prompt with a set of edges patched at once, in sampling order.

    Along a patched edge the receiver reads the sender's output in the corrupted run (or its mean,
    or zero); along any other, its output in this run, changed by what was patched before it. All
    edges patched is the corrupted run, none the clean run.

    Raises:
        InputError: an edge that the model does not have, an unknown ablation, no prompts.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> patched_run(student, prompts, ["m0->m1", "a1.h0->logits"]).shape
    torch.Size([8])
    """
    patcher = EdgePatcher(model, prompts, ablation=ablation, batch_size=batch_size)
    return patcher.metric([e if isinstance(e, Edge) else Edge.parse(e) for e in edges])


def _group_parts(
    model: TransformerBridge,
    group: PromptGroup,
    metric: str,
    ablation: Ablation,
    batch_size: int | None,
) -> list[tuple[Tensor, "_PatchedSlice"]]:
    replay = Replay(model, group.clean, group.answer)
    n_pos = group.clean.shape[1]
    rows = rows_per_batch(model, n_pos, batch_size)
    replacements = Replacements(replay, group, ablation, rows)
    read = metric_readout(replay, group, metric)
    first = replay.embed(group.clean[:1])
    attentions: list[LayerAttention] = []
    for layer in range(replay.n_layers):
        attentions.append(LayerAttention(replay, layer, first))
        first = replay.block(layer, first)
    parts = []
    for prompts in prompt_slices(replay, len(group.clean), n_pos, rows):
        clean = trace(replay, group.clean[prompts], rows).written
        other = replacements(prompts, clean)
        part = _PatchedSlice(replay, attentions, clean.embed, other, read, prompts)
        parts.append((group.index[prompts], part))
    return parts


class _PatchedSlice:
    """Some prompts of one group: their last run, layer by layer."""

    def __init__(
        self,
        replay: Replay,
        attentions: list[LayerAttention],
        embed: Float[Tensor, "batch pos d_model"],
        other: Written,
        read: Readout,
        prompts: slice,
    ) -> None:
        self._replay, self._attentions, self._other = replay, attentions, other
        self._read, self._prompts = read, prompts
        self._layout: Layout = layout_of(replay.model)
        self._mask: Tensor | None = None
        self._streams = [embed]
        self._written: dict[int, Tensor] = {}  # by join, where joins are more than a sum
        shape = (len(embed), len(self._layout.senders), *embed.shape[1:])
        self._changes = embed.new_zeros(shape)  # replaced minus own output of each sender
        self._changes[:, 0] = other.embed - embed

    @torch.no_grad()
    def metric(self, mask: Bool[Tensor, "receiver sender"]) -> Float[Tensor, "batch"]:
        first = self._first_difference(mask)
        self._mask = None  # not to be trusted until this run is through
        del self._streams[first + 1 :]
        for layer in range(first, self._replay.n_layers):
            self._streams.append(self._block(layer, self._streams[layer], mask))
        self._mask = mask.clone()
        joins, answer = 2 * self._replay.n_layers, self._replay.answer_slice
        end = self._read_by(self._streams[-1], mask[-1:], joins, answer)
        return self._read(end[:, 0, -1][None], self._prompts)[0]

    def _first_difference(self, mask: Tensor) -> int:
        """The first layer whose edges differ from the last run's; ``n_layers`` where none does."""
        if self._mask is None:
            return 0
        different = (mask != self._mask).any(1).nonzero()
        if len(different) == 0:
            return self._replay.n_layers
        return min(int(different[0]) // len(self._layout.layer_receivers(0)), self._replay.n_layers)

    def _block(
        self, layer: int, pre: Float[Tensor, "batch pos d_model"], mask: Tensor
    ) -> Float[Tensor, "batch _ d_model"]:
        """The stream after a block; after the last one, at the answer position only."""
        layout, replay = self._layout, self._replay
        at = replay.at(layer)
        first = layer * len(layout.layer_receivers(layer))
        mlp_row = first + len(layout.attention_receivers(layer))
        z = self._heads(layer, pre, mask[first:mlp_row], at)
        attention = self._attentions[layer].output(z)
        self._keep_written(2 * layer, at, attention)
        mid = replay.after_attention(layer, pre[:, at], attention)
        sender = 1 + layer * (layout.n_heads + 1)
        change = replay.head_writes(layer, self._other.z[layer][:, at] - z)
        self._changes[:, sender : sender + layout.n_heads, at] = rearrange(
            change, "b pos head d -> b head pos d"
        )
        own = pre[:, at] if replay.parallel else mid
        read = self._read_by(own, mask[mlp_row : mlp_row + 1], 2 * layer + 1, at)
        mlp = replay.mlp(layer, read[:, 0])
        self._keep_written(2 * layer + 1, at, mlp)
        self._changes[:, sender + layout.n_heads, at] = self._other.mlp[layer][:, at] - mlp
        return replay.after_mlp(layer, mid, mlp)

    def _keep_written(
        self, join: int, at: slice, written: Float[Tensor, "batch _ d_model"]
    ) -> None:
        if not self._replay.joins.additive:
            kept = self._written.setdefault(join, torch.zeros_like(self._streams[0]))
            kept[:, at] = written

    def _heads(
        self,
        layer: int,
        pre: Float[Tensor, "batch pos d_model"],
        mask: Bool[Tensor, "receiver sender"],
        at: slice,
    ) -> Float[Tensor, "batch _ head d_head"]:
        """The layer's z at some positions, every head's inputs read along their own edges."""
        attention = self._attentions[layer]
        kinds, which = torch.unique(mask, dim=0, return_inverse=True)
        normed = attention.normed(self._read_by(pre, kinds, 2 * layer))
        parts: dict[str, list[Tensor]] = {kind: [] for kind in ATTENTION_KINDS}
        for receiver, row in zip(
            self._layout.attention_receivers(layer), which.tolist(), strict=True
        ):
            head = receiver.head if receiver.head is not None else 0
            parts[receiver.kind].append(attention.project(receiver.kind, head, normed[:, row]))
        query, key, value = (torch.stack(parts[kind], 1) for kind in ATTENTION_KINDS)
        key, value = attention.for_query_heads(key), attention.for_query_heads(value)
        z = attention.attend(query[:, :, at], key, value)
        return rearrange(z, "b head pos d -> b pos head d")

    def _read_by(
        self,
        stream: Float[Tensor, "batch pos d_model"],
        mask: Bool[Tensor, "receiver sender"],
        n_joins: int,
        positions: slice = slice(None),
    ) -> Float[Tensor, "batch receiver pos d_model"]:
        """What receivers with these patched edges read where the plain stream is ``stream``.

        ``n_joins``: how many writes of attentions and MLPs have joined the stream before them.
        """
        if not mask.any():
            return stream[:, None].expand(-1, len(mask), -1, -1)
        joins, senders = self._replay.joins, len(self._layout.senders)
        if joins.additive:
            return stream[:, None] + self._patched(mask, slice(senders), positions)
        read = self._streams[0][:, None, positions] + self._patched(mask, slice(1), positions)
        first = 1
        for number in range(n_joins):
            layer, part = number // 2, PARTS[number % 2]
            own = slice(first, first + (1 if part == "mlp" else self._layout.n_heads))
            written = self._written[number][:, None, positions]
            written = written + self._patched(mask, own, positions)
            read, first = joins.join(layer, part, read, written), own.stop
        return read

    def _patched(
        self, mask: Bool[Tensor, "receiver sender"], senders: slice, positions: slice
    ) -> Float[Tensor, "batch receiver pos d_model"] | float:
        """What some senders' patched edges add to what they write."""
        used = mask[:, senders].any(0).nonzero()[:, 0] + (senders.start or 0)
        if len(used) == 0:
            return 0.0
        changes = self._changes[:, used.to(self._changes.device), positions]
        along = mask[:, used].to(changes.device, changes.dtype)
        return einsum(along, changes, "receiver sender, b sender pos d -> b receiver pos d")
