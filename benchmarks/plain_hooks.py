"""Edge attribution and path patching by plain hooks: what patching.py measures against."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.edges import Edge, Receiver, layout_of
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts


@contextmanager
def forked(model: TransformerBridge) -> Iterator[None]:
    """With a residual stream of its own for each query, key and value, and each head's output."""
    model.set_use_split_qkv_input(True)
    model.set_use_attn_result(True)
    try:
        yield
    finally:
        model.set_use_split_qkv_input(False)
        model.set_use_attn_result(False)


@dataclass(frozen=True)
class Batch:
    """Prompts and their answers."""

    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    correct: Int[Tensor, "batch"]
    incorrect: Int[Tensor, "batch"]

    def rows(self, first: int, end: int) -> "Batch":
        return Batch(*(part[first:end] for part in vars(self).values()))


def batch_of(prompts: Prompts) -> Batch:
    (group,) = prompts.groups
    return Batch(group.clean, group.corrupted, group.correct, group.incorrect)


def metric(model: TransformerBridge, batch: Batch) -> Float[Tensor, "batch"]:
    logits = model(batch.clean)[:, -1]
    rows = torch.arange(len(logits))
    return logits[rows, batch.correct] - logits[rows, batch.incorrect]


class Hooks:
    """All edges' scores, summed over a batch, by hooks that keep everything."""

    def __init__(self, model: TransformerBridge, batch: Batch) -> None:
        self.model, self.batch, self.layout = model, batch, layout_of(model)
        n_senders = len(self.layout.senders)
        shape = (*batch.clean.shape, n_senders, model.cfg.d_model)
        self.differences = torch.zeros(shape)  # corrupted minus clean outputs
        self.scores = torch.zeros(n_senders, len(self.layout.receivers))
        self.embeds: list[Tensor] = []

    def senders(self, sign: int) -> list[tuple[str, Callable]]:
        """Forward hooks that add (or subtract) every sender's output."""

        def add(place: int, tensor: Tensor, hook: object) -> None:
            output = tensor.detach() if tensor.ndim == 4 else tensor.detach()[:, :, None]
            self.differences[:, :, place : place + output.shape[2]] += sign * output

        def embed(tensor: Tensor, hook: object) -> None:
            self.embeds.append(tensor.detach())
            add(0, tensor, hook)

        hooks: list[tuple[str, Callable]] = [("blocks.0.hook_in", embed)]
        for layer in range(self.layout.n_layers):
            head, mlp = Node.attention_head(layer, 0), Node.mlp(layer)
            heads = partial(add, self.layout.position(head))
            hooks.append((f"blocks.{layer}.attn.hook_result", heads))
            mlps = partial(add, self.layout.position(mlp))
            hooks.append((f"blocks.{layer}.mlp.hook_out", mlps))
        return hooks

    def receivers(self) -> list[tuple[str, Callable]]:
        """Backward hooks that multiply every receiver's gradient with the differences."""

        def multiply(first: int, gradient: Tensor, hook: object) -> None:
            gradient = gradient if gradient.ndim == 4 else gradient[:, :, None]
            before = self.layout.n_before(self.layout.receivers[first])
            self.scores[:before, first : first + gradient.shape[2]] += einsum(
                self.differences[:, :, :before], gradient, "b pos s d, b pos r d -> s r"
            )

        hooks: list[tuple[str, Callable]] = []
        place = {receiver: number for number, receiver in enumerate(self.layout.receivers)}
        for layer in range(self.layout.n_layers):
            for kind in ("q", "k", "v"):
                first = place[Receiver(kind, layer, 0)]
                hooks.append((f"blocks.{layer}.attn.hook_{kind}_input", partial(multiply, first)))
            first = place[Receiver("mlp", layer)]
            hooks.append((f"blocks.{layer}.ln2.hook_in", partial(multiply, first)))
        return [*hooks, ("ln_final.hook_in", partial(multiply, place[Receiver("logits")]))]

    def run(self, points: list[float]) -> Float[Tensor, "sender receiver"]:
        """EAP with the gradient averaged over embeddings between corrupted (0) and clean (1)."""
        with torch.no_grad(), self.model.hooks(fwd_hooks=self.senders(1)):
            self.model(self.batch.corrupted)
        if points == [1.0]:
            self.gradient(None)
        else:
            with torch.no_grad(), self.model.hooks(fwd_hooks=self.senders(-1)):
                self.model(self.batch.clean)
            corrupted, clean = self.embeds
            for point in points:
                self.gradient(corrupted + point * (clean - corrupted))
        return self.scores / len(points)

    def gradient(self, embed: Tensor | None) -> None:
        """One forward and backward pass, from ``embed`` or the clean prompt's own embedding."""

        def start(tensor: Tensor, hook: object) -> Tensor:
            return (tensor if embed is None else embed).detach().requires_grad_()

        forward = [("blocks.0.hook_in", start), *(self.senders(-1) if embed is None else [])]
        with self.model.hooks(fwd_hooks=forward, bwd_hooks=self.receivers()):
            metric(self.model, self.batch).sum().backward()


def naive_scores(
    model: TransformerBridge, batch: Batch, points: list[float], rows: int
) -> Float[Tensor, "edge"]:
    """Scores summed over prompts, in the order of ``Layout.edges``."""
    layout = layout_of(model)
    total = torch.zeros(len(layout.senders), len(layout.receivers))
    with forked(model):
        for first in range(0, len(batch.clean), rows):
            total += Hooks(model, batch.rows(first, first + rows)).run(points)
    columns = [
        total[: layout.n_before(receiver), number]
        for number, receiver in enumerate(layout.receivers)
    ]
    return torch.cat(columns)


class OneEdge:
    """Path patching of edges from heads, one hooked run each, everything clean cached."""

    def __init__(self, model: TransformerBridge, batch: Batch) -> None:
        self.model, self.batch = model, batch
        clean, corrupted = self.outputs(batch.clean), self.outputs(batch.corrupted)
        self.streams = {name: clean[name] for name in clean if name.endswith("hook_in")}
        self.changes = {name: corrupted[name] - clean[name] for name in clean}
        with torch.no_grad():
            self.metric = metric(model, batch)

    def outputs(self, tokens: Tensor) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor, hook: object) -> None:
            kept[name] = tensor

        names = [
            f"blocks.{layer}.{point}"
            for layer in range(self.model.cfg.n_layers)
            for point in ("hook_in", "attn.hook_z")
        ]
        hooks = [(name, partial(keep, name)) for name in names]
        with torch.no_grad(), self.model.hooks(fwd_hooks=hooks):
            self.model(tokens)
        return kept

    @torch.no_grad()
    def effect(self, edge: Edge) -> Float[Tensor, "batch"]:
        sender, receiver = edge.sender, edge.receiver
        z = self.changes[f"blocks.{sender.layer}.attn.hook_z"][:, :, sender.head]
        change = z @ self.model.blocks[sender.layer].attn.W_O[sender.head]
        block, kind = self.model.blocks[receiver.layer], receiver.kind
        normed = block.ln1(self.streams[f"blocks.{receiver.layer}.hook_in"] + change)
        weight, bias = (getattr(block.attn, f"{name}_{kind.upper()}") for name in ("W", "b"))
        own = normed @ weight[receiver.head] + bias[receiver.head]

        def replace(tensor: Tensor, hook: object) -> Tensor:
            tensor = tensor.clone()
            tensor[:, :, receiver.head] = own
            return tensor

        point = f"blocks.{receiver.layer}.attn.{kind}.hook_out"
        with self.model.hooks(fwd_hooks=[(point, replace)]):
            return metric(self.model, self.batch) - self.metric
