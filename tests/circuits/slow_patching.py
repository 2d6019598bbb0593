"""Path patching the obvious way: explicit hooks, one edge a run, plain loops.

A receiver's input is changed with hooks at the receiver itself. An attention receiver's new query,
key or value is taken from a second run of the whole layer on the changed stream.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.edges import Edge, Layout, Receiver
from circuitkd.models import is_parallel
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup

Values = dict[str, Tensor]


def run(model: TransformerBridge, tokens: Tensor, hooks: dict[str, Callable]) -> Tensor:
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks.items())):
        return model(tokens)[:, -1]


def all_values(model: TransformerBridge, tokens: Tensor) -> Values:
    with torch.no_grad():
        return dict(model.run_with_cache(tokens)[1].items())


def sender_values(
    model: TransformerBridge, group: PromptGroup, sender: Node, ablation: str
) -> Tensor:
    """What the sender writes [batch pos d_model] when it is replaced (or ``"clean"``)."""
    tokens = {"clean": group.clean, "corrupted": group.corrupted}.get(ablation, group.means)
    written = output_of(model, all_values(model, tokens), sender)
    if ablation == "mean":
        written = written.mean(0, keepdim=True)
    return torch.zeros_like(written[:1]) if ablation == "zero" else written


def output_of(model: TransformerBridge, values: Values, sender: Node) -> Tensor:
    if sender.kind == "input":
        return values["blocks.0.hook_resid_pre"]
    if sender.kind == "mlp":
        return values[f"blocks.{sender.layer}.hook_mlp_out"]
    z = values[f"blocks.{sender.layer}.attn.hook_z"].flatten(2)
    assert sender.head is not None
    d_head = model.cfg.d_head
    own = slice(sender.head * d_head, (sender.head + 1) * d_head)
    return z[..., own] @ model.blocks[sender.layer].attn.W_O[sender.head]


def slow_effect(
    model: TransformerBridge,
    group: PromptGroup,
    edge: Edge,
    metric: Callable[[Tensor], Tensor],
    mode: str = "direct",
    ablation: str = "corrupted",
) -> Tensor:
    """metric(patched) - metric(clean) on each prompt of a group."""
    change = sender_values(model, group, edge.sender, ablation) - sender_values(
        model, group, edge.sender, "clean"
    )
    if mode == "through-mlps":
        change = through_mlps(model, group, edge, change)
    hooks = receiver_hooks(model, group, edge, change)
    return metric(run(model, group.clean, hooks)) - metric(run(model, group.clean, {}))


def receiver_hooks(
    model: TransformerBridge, group: PromptGroup, edge: Edge, change: Tensor
) -> dict[str, Callable]:
    """Hooks that let the receiver, and nothing else, read its stream plus ``change``."""
    receiver, layer = edge.receiver, edge.receiver.layer
    if receiver.kind == "logits":
        return {"ln_final.hook_in": lambda stream, hook: stream + change}
    if receiver.kind == "mlp":
        assert layer is not None
        norm, read = mlp_reads(model, all_values(model, group.clean), layer)
        with torch.no_grad():
            changed = norm(read + change)
        return {f"blocks.{layer}.mlp.hook_in": lambda _, hook: changed}
    part = f"blocks.{layer}.attn.{receiver.kind}.hook_out"
    kept: Values = {}

    def keep(tensor: Tensor, hook: object) -> None:
        kept["changed"] = tensor.clone()

    move = {f"blocks.{layer}.ln1.hook_in": lambda stream, hook: stream + change, part: keep}
    run(model, group.clean, move)

    def replace(tensor: Tensor, hook: object) -> Tensor:
        assert tensor.ndim == 4  # TransformerLens shows hooks [batch pos head d_head] here
        tensor = tensor.clone()
        tensor[:, :, receiver.head] = kept["changed"][:, :, receiver.head]
        return tensor

    return {part: replace}


def through_mlps(
    model: TransformerBridge, group: PromptGroup, edge: Edge, change: Tensor
) -> Tensor:
    """Change of the receiver's stream when all heads are frozen and MLPs recompute."""
    clean = all_values(model, group.clean)
    first = edge.sender.layer if edge.sender.layer is not None else 0
    if edge.sender.kind == "mlp" or (edge.sender.kind == "head" and is_parallel(model)):
        first += 1  # the first MLP that reads it
    last = model.cfg.n_layers if edge.receiver.layer is None else edge.receiver.layer
    total = change.expand_as(clean["blocks.0.hook_resid_pre"])
    for layer in range(first, last):
        block, (norm, read) = model.blocks[layer], mlp_reads(model, clean, layer)
        with torch.no_grad():
            total = total + mlp_writes(block, norm(read + total)) - mlp_writes(block, norm(read))
    return total


def mlp_reads(
    model: TransformerBridge, values: Values, layer: int
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The layer norm before the MLP, and the stream that it reads."""
    block, name = model.blocks[layer], f"blocks.{layer}.hook_resid_"
    norm = block.ln2 if hasattr(block, "ln2") else block.ln1
    return norm.original_component, values[name + ("mid" if f"{name}mid" in values else "pre")]


def mlp_writes(block: Any, normed: Tensor) -> Tensor:
    output = block.mlp(normed)
    return output[0] if isinstance(output, tuple) else output  # an MoE also says how it routed


def slow_patched_logits(
    model: TransformerBridge, group: PromptGroup, edges: set[Edge], layout: Layout
) -> Tensor:
    """Logits at the last position with a set of edges patched, one receiver at a time.

    What a receiver reads is added up sender by sender: from the corrupted run along patched edges,
    from this run along all others, and the attention biases, which belong to no sender.
    """
    corrupted = all_values(model, group.corrupted)
    written = {Node("input"): all_values(model, group.clean)["blocks.0.hook_resid_pre"]}
    biases = torch.zeros(model.cfg.d_model)

    def read(receiver: Receiver) -> Tensor:
        total = biases.clone()
        for sender in layout.senders[: layout.n_before(receiver)]:
            patched = Edge(sender, receiver) in edges
            total = total + (output_of(model, corrupted, sender) if patched else written[sender])
        return total

    for layer in range(model.cfg.n_layers):
        block = model.blocks[layer]
        hooks: dict[str, Callable] = {}
        parts = {kind: [] for kind in "qkv"}
        for receiver in layout.attention_receivers(layer):
            stream, kept = read(receiver), {}
            run(
                model,
                group.clean,
                {
                    f"blocks.{layer}.ln1.hook_in": lambda s, hook, stream=stream: stream,
                    f"blocks.{layer}.attn.{receiver.kind}.hook_out": lambda t, hook, kept=kept: (
                        kept.update(t=t.clone()) or t
                    ),
                },
            )
            parts[receiver.kind].append(kept["t"][:, :, receiver.head])
        for kind, own in parts.items():
            value = torch.stack(own, 2)
            name = f"blocks.{layer}.attn.{kind}.hook_out"
            hooks[name] = lambda t, hook, value=value: value
        kept_z: Values = {}
        hooks[f"blocks.{layer}.attn.hook_z"] = lambda z, hook, kept=kept_z: kept.update(z=z.clone())
        run(model, group.clean, hooks)
        for head in range(model.cfg.n_heads):
            named = {f"blocks.{layer}.attn.hook_z": kept_z["z"]}
            node = Node.attention_head(layer, head)
            written[node] = output_of(model, named, node)
        before_attention, bias = biases, getattr(block.attn, "b_O", None)
        biases = biases if bias is None else biases + bias
        if is_parallel(model):
            mlp_input = read(Receiver("mlp", layer)) - biases + before_attention
        else:
            mlp_input = read(Receiver("mlp", layer))
        norm = (block.ln2 if hasattr(block, "ln2") else block.ln1).original_component
        with torch.no_grad():
            written[Node.mlp(layer)] = mlp_writes(block, norm(mlp_input))
    with torch.no_grad():
        return model.unembed(model.ln_final(read(Receiver("logits"))))[:, -1]
