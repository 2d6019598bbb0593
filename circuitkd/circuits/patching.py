"""Path patching: the exact effect of one edge at a time.

The sender's output is replaced along one edge only: the receiver reads its residual stream, before
the layer norm, with the sender's change added. What lies between them is, by ``mode``,

- ``direct``: kept at its clean value, so the receiver's stream changes by the sender's change;
- ``through-mlps``: heads kept clean, MLPs recomputed (Wang et al. 2022), so that the receiver's
  stream changes by the sender's change and by those of the MLPs between.

Then the receiver's new output flows on normally through everything after it. The sender is
replaced by its output on the paired corrupted prompt (``ablation="corrupted"``), by its mean over
other corrupted prompts, or by zero.

Sign: ``effect`` = metric(patched) - metric(clean). Negative means that the edge helps.

Nothing before the receiver is computed twice: a head's changed query, key or value changes the
stream after its attention by (z' - z) W_O, and only the blocks from there on run again. Edges into
the logits need no block at all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._attention import CleanHeads, LayerAttention
from circuitkd.circuits._edge_results import EdgeEffects
from circuitkd.circuits._joins import PARTS, Part
from circuitkd.circuits._patched import EdgePatcher, patched_run
from circuitkd.circuits._senders import (
    Replacements,
    Trace,
    check_arguments,
    prompt_slices,
    sender_changes,
    trace,
)
from circuitkd.circuits.edges import Edge, Layout, Receiver, layout_of
from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.circuits.influence import Progress
from circuitkd.circuits.readout import Readout, metric_readout
from circuitkd.errors import InputError, RunError
from circuitkd.models import model_label
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts
from circuitkd.runs import NO_CHECKPOINT, Checkpoint, ScopedCheckpoint

__all__ = ["MODES", "EdgeEffects", "EdgePatcher", "Mode", "patched_run", "path_patching"]

Mode = Literal["direct", "through-mlps"]
MODES: tuple[str, ...] = ("direct", "through-mlps")


def path_patching(
    model: TransformerBridge,
    prompts: Prompts,
    senders: Iterable[Node | str] | None = None,
    receivers: Iterable[Receiver | str] | None = None,
    *,
    edges: Iterable[Edge | str] | None = None,
    mode: str = "direct",
    ablation: str = "corrupted",
    batch_size: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    progress: Progress | None = None,
) -> EdgeEffects:
    """The effect of patching each edge, one at a time, on each prompt.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        senders: nodes or their names; by default all.
        receivers: receivers or their names (``a9.h6<q>``, ``m3``, ``logits``); by default all.
        edges: measure exactly these instead, in this order.
        mode: ``"direct"`` or ``"through-mlps"`` (see the module).
        ablation: what the sender is replaced by: ``"corrupted"``, ``"mean"`` or ``"zero"``.
        batch_size: prompts that go through the model at once; by default what suits the device.
            It changes no number beyond rounding.
        checkpoint: keeps every finished receiver; a later call with the same arguments goes on.
        progress: called as ``progress(stage, done, total)``, in edges times prompts.

    Returns:
        ``EdgeEffects``: effects [prompt, edge] in the metric's unit, in sampling order.

    Raises:
        InputError: unknown mode, ablation, node or edge; no edge between senders and receivers.
        ArchitectureError: the engine does not understand the network.

    Source: Wang et al. 2022 (IOI), section 3.1 and appendix B; Goldowsky-Dill et al. 2023.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> path_patching(student, prompts, receivers=["logits"]).effects.shape
    torch.Size([8, 19])
    """
    known = check_arguments(prompts, ablation, batch_size)
    if mode not in MODES:
        raise InputError(f"Unknown mode {mode!r}: choose one of {', '.join(MODES)}.")
    layout = layout_of(model)
    wanted = _wanted(layout, senders, receivers, edges)
    effects = torch.zeros(len(prompts), len(wanted))
    clean = torch.zeros(len(prompts))
    done = 0
    for number, group in enumerate(prompts.groups):
        run = _GroupRun(
            model,
            group,
            prompts.metric,
            wanted,
            through_mlps=mode == "through-mlps",
            batch_size=batch_size,
            replacements=lambda replay, rows, group=group: Replacements(replay, group, known, rows),
            checkpoint=ScopedCheckpoint(checkpoint, f"patching.{number}."),
        )
        for rows, columns, values in run.effects():
            effects[group.index[rows][:, None], torch.tensor(columns)] = values
            done += values.numel()
            if progress is not None:
                progress(f"Patching {model_label(model)}", done, effects.numel())
        clean[group.index] = run.clean
    if not (torch.isfinite(effects).all() and torch.isfinite(clean).all()):
        raise RunError(f"{model_label(model)} gave NaN or infinite metrics; try dtype float32.")
    return EdgeEffects(
        model=model_label(model),
        task=prompts.task,
        variant=prompts.variant,
        bos=prompts.bos,
        mode=mode,
        ablation=known,
        metric=prompts.metric,
        edges=wanted,
        effects=effects,
        clean=clean,
    )


def _wanted(
    layout: Layout,
    senders: Iterable[Node | str] | None,
    receivers: Iterable[Receiver | str] | None,
    edges: Iterable[Edge | str] | None,
) -> tuple[Edge, ...]:
    if edges is not None:
        if senders is not None or receivers is not None:
            raise InputError("Give either edges, or senders and receivers.")
        wanted = tuple(Edge.parse(edge) if isinstance(edge, str) else edge for edge in edges)
        layout.require(wanted)
    else:
        chosen = _chosen(senders, Node.parse, layout.senders, "sender")
        read = _chosen(receivers, Receiver.parse, layout.receivers, "receiver")
        wanted = tuple(e for e in layout.edges if e.sender in chosen and e.receiver in read)
    if len(set(wanted)) < max(1, len(wanted)):
        raise InputError("There is no edge to patch, or one is there twice.")
    return wanted


def _chosen(
    given: Iterable[object] | None, parse: Callable, known: Sequence, what: str
) -> set[object]:
    if given is None:
        return set(known)
    chosen = {parse(item) if isinstance(item, str) else item for item in given}
    if unknown := chosen - set(known):
        names = ", ".join(sorted(str(item) for item in unknown))
        raise InputError(f"The model has no {what} {names}. It has for example {known[-1]}.")
    return chosen


Pair = tuple[int, int, Receiver]  # column of the result, sender's position, receiver


class _GroupRun:
    """All wanted edges on the prompts of one group."""

    def __init__(
        self,
        model: TransformerBridge,
        group: PromptGroup,
        metric: str,
        edges: Sequence[Edge],
        *,
        through_mlps: bool,
        batch_size: int | None,
        replacements: Callable[[Replay, int], Replacements],
        checkpoint: Checkpoint,
    ) -> None:
        self.group, self.through_mlps, self.checkpoint = group, through_mlps, checkpoint
        self.replay = Replay(model, group.clean, group.answer)
        self.layout = layout_of(model)
        self.read: Readout = metric_readout(self.replay, group, metric)
        n_pos = group.clean.shape[1]
        self.rows = rows_per_batch(model, n_pos, batch_size)
        self.slices = prompt_slices(self.replay, len(group.clean), n_pos, self.rows)
        self._replacements = replacements
        self.clean = torch.zeros(len(group.clean))  # the clean metric, filled by ``effects``
        self._attention: dict[int, LayerAttention] = {}
        self.pairs = self._in_order(edges)

    def effects(self) -> Iterator[tuple[slice, list[int], Float[Tensor, "batch edge"]]]:
        """Prompts, columns, effects: piece by piece. Fills ``clean``."""
        replacements = cache(partial(self._replacements, self.replay, self.rows))
        for prompts in self.slices:
            yield from self._slice_effects(prompts, replacements)

    def _slice_effects(
        self, prompts: slice, replacements: Callable[[], Replacements]
    ) -> Iterator[tuple[slice, list[int], Float[Tensor, "batch edge"]]]:
        run = cache(lambda: _SliceRun(self, prompts, replacements()))
        name = f"{prompts.start}-{prompts.stop}"
        self.clean[prompts] = self._kept(f"{name}.clean", lambda: run().clean_metric)
        for piece in self._pieces(prompts.stop - prompts.start):
            pairs = [self.pairs[number] for number in piece]
            key = f"{name}.{piece[0]}-{piece[-1]}"
            effects = self._kept(key, lambda pairs=pairs: run().effects(pairs))
            yield prompts, [column for column, _, _ in pairs], effects

    def _kept(self, key: str, measure: Callable[[], Tensor]) -> Tensor:
        """From the checkpoint, or measured now and put there."""
        part = self.checkpoint.get(key)
        if part is None:
            part = {"value": measure()}
            self.checkpoint.put(key, part)
        return part["value"]

    def attention(self, layer: int, stream: Float[Tensor, "batch pos d_model"]) -> LayerAttention:
        if layer not in self._attention:
            self._attention[layer] = LayerAttention(self.replay, layer, stream)
        return self._attention[layer]

    def _in_order(self, edges: Sequence[Edge]) -> list[Pair]:
        """The edges in order of computation of their receivers."""
        place = {receiver: number for number, receiver in enumerate(self.layout.receivers)}
        pairs = [(c, self.layout.position(e.sender), e.receiver) for c, e in enumerate(edges)]
        return sorted(pairs, key=lambda pair: (place[pair[2]], pair[1]))

    def _pieces(self, n_prompts: int) -> Iterator[list[int]]:
        """Numbers of pairs that are measured and kept together: those of one receiver, or of
        several of one stage where they fit into one batch.
        """
        stack = max(1, self.rows // n_prompts)
        piece: list[int] = []
        for receiver, run in groupby(range(len(self.pairs)), key=lambda n: self.pairs[n][2]):
            numbers = list(run)
            if piece and (
                self._stage(self.pairs[piece[0]][2]) != self._stage(receiver)
                or len(piece) + len(numbers) > stack
            ):
                yield piece
                piece = []
            piece += numbers
        yield piece

    @staticmethod
    def _stage(receiver: Receiver) -> tuple[int | None, bool]:
        return receiver.layer, receiver.is_attention


class _SliceRun:
    """Edges on one slice of prompts, receivers in order of computation."""

    def __init__(self, group: _GroupRun, prompts: slice, replacements: Replacements) -> None:
        self.group, self.prompts, self.replay = group, prompts, group.replay
        self.clean: Trace = trace(group.replay, group.group.clean[prompts], group.rows)
        other = replacements(prompts, self.clean.written)
        self.changes = sender_changes(group.replay, self.clean.written, other)
        self.senders = sorted({sender for _, sender, _ in group.pairs})
        self.passed = 0  # joins (two a layer) that ``changes`` were carried along
        end = self.clean.entering(self.replay.n_layers)[:, self.replay.answer]
        self.clean_metric = group.read(end[None], prompts)[0]

    @torch.no_grad()
    def effects(self, pairs: Sequence[Pair]) -> Float[Tensor, "batch edge"]:
        """metric(patched) - metric(clean) of edges into receivers of one stage."""
        receiver = pairs[0][2]
        layer = self.replay.n_layers if receiver.layer is None else receiver.layer
        self._carry_to(2 * layer + (receiver.kind == "mlp" and not self.replay.parallel))
        heads = self._heads(layer) if receiver.is_attention else None
        stack = max(1, self.group.rows // len(self.clean.embed))
        if receiver.kind == "logits":
            stack = len(pairs)
        parts = []
        for first in range(0, len(pairs), stack):
            chunk = pairs[first : first + stack]
            end = (
                self._logits(chunk) if receiver.kind == "logits" else self._end(layer, chunk, heads)
            )
            parts.append(self.group.read(rearrange(end, "b s d -> s b d"), self.prompts))
        return (torch.cat(parts) - self.clean_metric).T.contiguous()

    def _logits(self, pairs: Sequence[Pair]) -> Float[Tensor, "batch edge d_model"]:
        answer = self.replay.answer
        end = self.clean.entering(self.replay.n_layers)[:, answer]
        return end[:, None] + self.changes[:, [sender for _, sender, _ in pairs], answer]

    def _end(
        self, layer: int, pairs: Sequence[Pair], heads: CleanHeads | None
    ) -> Float[Tensor, "batch edge d_model"]:
        """Final residual streams with the receivers' changed outputs."""
        replay, at = self.replay, self.replay.at(layer)
        seen = self.clean.layers[layer]
        if heads is None:
            change = self.changes[:, [sender for _, sender, _ in pairs]][:, :, at]
            written = replay.mlp(layer, seen.read[:, None, at] + change)
            after = replay.after_mlp(layer, seen.mid[:, None, at], written)
        else:
            entering = seen.pre[:, None]
            parts = []
            for receiver, own in groupby(pairs, key=lambda pair: pair[2]):
                stream = entering + self.changes[:, [sender for _, sender, _ in own]]
                parts.append(heads.write_change(receiver, stream, at))
            written = seen.attention[:, None, at] + torch.cat(parts, 1)
            moved = replay.after_attention(layer, entering[:, :, at], written)
            # Where the MLP reads what enters the block, it reads the clean stream.
            after = replay.finish(layer, entering[:, :, at].expand_as(moved), moved)
        return self._onward(layer, after.flatten(0, 1)).unflatten(0, after.shape[:2])

    def _onward(
        self, layer: int, stream: Float[Tensor, "batch _ d_model"]
    ) -> Float[Tensor, "batch d_model"]:
        """The final residual stream at the answer, from the output of block ``layer``."""
        last = self.replay.n_layers - 1
        if layer == last:
            return stream[:, -1]  # the answer's position is all there is
        for later in range(layer + 1, last):
            stream = self.replay.block(later, stream)
        attention = self.group.attention(last, self.clean.entering(last))
        pre = stream[:, self.replay.answer_slice]
        written = attention.output(attention.at_end(stream))[:, None]
        mid = self.replay.after_attention(last, pre, written)
        return self.replay.finish(last, pre, mid)[:, -1]

    def _heads(self, layer: int) -> CleanHeads:
        entering = self.clean.entering(layer)
        attention = self.group.attention(layer, entering)
        return CleanHeads(attention, self.replay, entering, self.clean.layers[layer].z)

    def _carry_to(self, join: int) -> None:
        """Turn changes of what senders write into changes of the stream that enters a join.

        Join 2 l is that of layer l's attention with the stream, join 2 l + 1 that of its MLP.
        """
        layout, additive = self.group.layout, self.replay.joins.additive
        for number in range(self.passed, join):
            layer, part = number // 2, PARTS[number % 2]
            if additive and not (part == "mlp" and self.group.through_mlps):
                continue  # what is added stays what it was
            receiver = Receiver("mlp", layer) if part == "mlp" else Receiver("q", layer, 0)
            before = layout.n_before(receiver)
            self._carry(layer, part, [s for s in self.senders if s < before], own=False)
            if not additive:
                after = before + (1 if part == "mlp" else layout.n_heads)
                self._carry(layer, part, [s for s in self.senders if before <= s < after], own=True)
        self.passed = max(self.passed, join)

    def _carry(self, layer: int, part: Part, senders: Sequence[int], *, own: bool) -> None:
        """Carry the changes of some senders along one join; ``own``: those of its part itself."""
        stack = max(1, self.group.rows // len(self.clean.embed))
        for first in range(0, len(senders), stack):
            chunk = senders[first : first + stack]
            self.changes[:, chunk] = self._behind(layer, part, self.changes[:, chunk], own=own)

    def _behind(
        self, layer: int, part: Part, change: Float[Tensor, "batch stack pos d_model"], *, own: bool
    ) -> Float[Tensor, "batch stack pos d_model"]:
        joins, seen = self.replay.joins, self.clean.layers[layer]
        stream, written, after = (
            (seen.mid, seen.mlp, seen.post)
            if part == "mlp"
            else (seen.pre, seen.attention, seen.mid)
        )
        stream, written, after = stream[:, None], written[:, None], after[:, None]
        if own:
            return joins.join(layer, part, stream, written + change) - after
        again = written
        if part == "mlp" and self.group.through_mlps:
            again = self.replay.mlp(layer, seen.read[:, None] + change)
        if joins.additive:
            return change + again - written
        return joins.join(layer, part, stream + change, again) - after
