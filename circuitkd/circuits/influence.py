"""Exact influence of every head and MLP: replace its output, and see what the metric does.

A head is replaced at ``hook_z`` (its output before W_O), an MLP at its output, at every position,
by one of

- ``mean``: its mean over other corrupted prompts of the same shape, position by position;
- ``zero``: zero;
- ``resample``: its value on the paired corrupted prompt.

Sign: ``effect`` = metric(ablated) - metric(clean). Negative means that the node helps.

The clean stream and the stream that gives the replacement values advance block by block, side by
side. Replacing a head's z by r changes the residual stream after its attention by (r - z) W_O, so
the ablated block costs only its MLP; an MLP's ablation starts at the next block.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.engine import Observed, Replay, rows_per_batch
from circuitkd.circuits.influence_result import Influence
from circuitkd.circuits.readout import Readout, metric_readout
from circuitkd.errors import InputError, RunError
from circuitkd.models import component_nodes_of, model_label
from circuitkd.prompts import PromptGroup, Prompts
from circuitkd.runs import NO_CHECKPOINT, Checkpoint, ScopedCheckpoint

Ablation = Literal["mean", "zero", "resample"]
ABLATIONS: tuple[str, ...] = ("mean", "zero", "resample")
Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``."""


def node_influence(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    ablation: str = "mean",
    batch_size: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    progress: Progress | None = None,
) -> Influence:
    """The effect of ablating each head and each MLP, one at a time, on each prompt.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        ablation: ``"mean"``, ``"zero"`` or ``"resample"`` (see the module).
        batch_size: prompts that go through the model at once; by default what suits the device.
            It changes no number beyond rounding.
        checkpoint: keeps every finished layer; a later call with the same arguments goes on.
        progress: called as ``progress(stage, done, total)``, done and total in layers.

    Returns:
        ``Influence``: effects [prompt, node] in the metric's unit, in sampling order.

    Raises:
        InputError: unknown ablation, no prompts, batch size below 1.
        ArchitectureError: the engine does not understand the network.

    Source: mean ablation as in Wang et al. 2022 (IOI) and Lan et al. 2023.

    >>> import circuitkd as ckd
    >>> teacher = ckd.load_model("tiny-teacher")
    >>> prompts = ckd.load_task("numerals").sample(teacher, n=8, seed=0)
    >>> node_influence(teacher, prompts).effects.shape
    torch.Size([8, 36])
    """
    _validate(prompts, ablation, batch_size)
    nodes = component_nodes_of(model)
    metrics = torch.zeros(len(prompts), len(nodes))
    clean = torch.zeros(len(prompts))
    total, done = len(prompts.groups) * model.cfg.n_layers, 0
    for number, group in enumerate(prompts.groups):
        for layer, part in _group_parts(
            model,
            group,
            prompts.metric,
            ablation,
            batch_size,
            ScopedCheckpoint(checkpoint, f"influence.{number}."),
        ):
            columns = slice(layer * (model.cfg.n_heads + 1), (layer + 1) * (model.cfg.n_heads + 1))
            metrics[group.index, columns] = part["ablated"]
            if "clean" in part:
                clean[group.index] = part["clean"]
            done += 1
            if progress is not None:
                progress(f"Ablating {model_label(model)}", done, total)
    if not (torch.isfinite(metrics).all() and torch.isfinite(clean).all()):
        raise RunError(f"{model_label(model)} gave NaN or infinite metrics; try dtype float32.")
    return Influence(
        model=model_label(model),
        task=prompts.task,
        variant=prompts.variant,
        bos=prompts.bos,
        ablation=ablation,
        metric=prompts.metric,
        nodes=nodes,
        effects=metrics - clean[:, None],
        clean=clean,
    )


def _validate(prompts: Prompts, ablation: str, batch_size: int | None) -> None:
    if ablation not in ABLATIONS:
        raise InputError(f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}.")
    if len(prompts) == 0:
        raise InputError("There are no prompts to measure on.")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"The batch size must be at least 1, not {batch_size}.")


def _group_parts(
    model: TransformerBridge,
    group: PromptGroup,
    metric: str,
    ablation: str,
    batch_size: int | None,
    checkpoint: Checkpoint,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """For each layer: the metric with each node ablated, [batch, heads then MLP], of one group.

    The last layer's part also holds the clean metric [batch], which the clean stream has by then.
    """
    kept = {layer: checkpoint.get(str(layer)) for layer in range(model.cfg.n_layers)}
    if all(part is not None for part in kept.values()):
        yield from ((layer, part) for layer, part in kept.items() if part is not None)
        return
    run = _GroupRun(model, group, metric, ablation, batch_size)
    for layer in range(model.cfg.n_layers):
        part = kept[layer]
        if part is None:
            part = {"ablated": run.ablated(layer)}
            if layer == model.cfg.n_layers - 1:
                part["clean"] = run.clean_metric()
            checkpoint.put(str(layer), part)
        else:
            run.skip(layer)
        yield layer, part


class _GroupRun:
    """The two streams of one group, advanced layer by layer."""

    def __init__(
        self,
        model: TransformerBridge,
        group: PromptGroup,
        metric: str,
        ablation: str,
        batch_size: int | None,
    ) -> None:
        self.replay = Replay(model, group.clean, group.answer)
        self.read: Readout = metric_readout(self.replay, group, metric)
        self.rows = rows_per_batch(model, group.clean.shape[1], batch_size)
        self.ablation = ablation
        self.clean = self.replay.embed(group.clean)
        sources = {"mean": group.means, "resample": group.corrupted, "zero": None}[ablation]
        self.source = None if sources is None else self.replay.embed(sources)

    def skip(self, layer: int) -> None:
        """Advance over a layer whose effects are known."""
        self.clean = self._advance(layer, self.clean)
        if self.source is not None:
            self.source = self._advance(layer, self.source)

    def clean_metric(self) -> Float[Tensor, "batch"]:
        """The metric of the clean stream, once it is behind the last layer."""
        return self._metric(lambda rows: self.clean[rows, self.replay.answer])

    def ablated(self, layer: int) -> Float[Tensor, "batch node"]:
        """The metric with each of the layer's heads ablated, then with its MLP; advances."""
        seen = self._observe(layer, self.clean)
        replacement_z, replacement_mlp = self._replacements(layer, seen)
        self.clean = seen.post
        heads = self._head_metrics(layer, seen, replacement_z)
        post = self.replay.after_mlp(layer, seen.mid, replacement_mlp)
        mlp = self._metric(lambda rows: self.replay.end_after_block(layer, post[rows]))
        return torch.cat([heads, mlp[None]]).T

    def _replacements(self, layer: int, seen: Observed) -> tuple[Tensor, Tensor]:
        if self.source is None:
            return torch.zeros_like(seen.z), torch.zeros_like(seen.mlp)
        other = self._observe(layer, self.source)
        self.source = other.post
        if self.ablation == "mean":
            return (
                other.z.float().mean(0, keepdim=True).to(other.z.dtype),
                other.mlp.float().mean(0, keepdim=True).to(other.mlp.dtype),
            )
        return other.z, other.mlp

    def _head_metrics(
        self, layer: int, seen: Observed, replacement: Float[Tensor, "#batch pos head d_head"]
    ) -> Float[Tensor, "head batch"]:
        change = self.replay.head_writes(layer, replacement - seen.z)
        n_prompts, n_heads = change.shape[0], change.shape[2]
        stack = max(1, self.rows // n_prompts)
        metrics = torch.empty(n_heads, n_prompts)
        for first in range(0, n_heads, stack):
            heads = slice(first, first + stack)
            for prompts in _slices(n_prompts, self.rows):
                moved = rearrange(change[prompts, :, heads], "b pos head d -> head b pos d")
                end = self.replay.end_after_attention(layer, seen.of(prompts), moved)
                metrics[heads, prompts] = self.read(end, prompts)
        return metrics

    def _metric(self, end: Callable[[slice], Tensor]) -> Float[Tensor, "batch"]:
        slices = _slices(len(self.clean), self.rows)
        return torch.cat([self.read(end(rows)[None], rows)[0] for rows in slices])

    def _advance(self, layer: int, stream: Tensor) -> Tensor:
        slices = _slices(len(stream), self.rows)
        return torch.cat([self.replay.block(layer, stream[rows]) for rows in slices])

    def _observe(self, layer: int, stream: Tensor) -> Observed:
        return observe_in_slices(self.replay, layer, stream, self.rows)


def observe_in_slices(
    replay: Replay,
    layer: int,
    stream: Float[Tensor, "batch pos d_model"],
    rows: int,
    *,
    pattern: bool = False,
) -> Observed:
    """``replay.observe``, at most ``rows`` prompts at a time."""
    parts = [
        replay.observe(layer, stream[prompts], pattern=pattern)
        for prompts in _slices(len(stream), rows)
    ]
    if len(parts) == 1:
        return parts[0]
    return Observed.joined(parts)


def _slices(n: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]
