"""Path patching the obvious way: explicit hooks, one edge a run, plain loops.

A receiver's input is changed with hooks at the receiver itself. An attention receiver's new query,
key or value is taken from a second run of the whole layer on the changed stream.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.edges import Edge, Layout, Receiver
from circuitkd.models import family_of_model, is_parallel
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup

Values = dict[str, Tensor]


def run(
    model: TransformerBridge, tokens: Tensor, hooks: dict[str, Callable], answer: int = -1
) -> Tensor:
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks.items())):
        return model(tokens)[:, answer]


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
        return values["blocks.0.hook_in"]
    if sender.kind == "mlp":
        return values[f"blocks.{sender.layer}.mlp.hook_out"]
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
    hooks = receiver_hooks(model, group, edge, change, mode)
    patched = run(model, group.clean, hooks, group.answer)
    return metric(patched) - metric(run(model, group.clean, {}, group.answer))


def receiver_hooks(
    model: TransformerBridge, group: PromptGroup, edge: Edge, change: Tensor, mode: str = "direct"
) -> dict[str, Callable]:
    """Hooks that let the receiver, and nothing else, read its stream with the sender changed."""
    receiver, layer = edge.receiver, edge.receiver.layer
    with torch.no_grad():
        stream = receiver_stream(model, group, edge, change, mode)
    if receiver.kind == "logits":
        return {family_of_model(model).end: lambda _, hook: stream}
    if receiver.kind == "mlp":
        assert layer is not None
        with torch.no_grad():
            changed = mlp_norm(model, layer)(stream)
        return {f"blocks.{layer}.mlp.hook_in": lambda _, hook: changed}
    part = f"blocks.{layer}.attn.{receiver.kind}.hook_out"
    kept: Values = {}

    def keep(tensor: Tensor, hook: object) -> None:
        kept["changed"] = tensor.clone()

    run(model, group.clean, {f"blocks.{layer}.hook_in": lambda _, hook: stream, part: keep})

    def replace(tensor: Tensor, hook: object) -> Tensor:
        assert tensor.ndim == 4  # TransformerLens shows hooks [batch pos head d_head] here
        tensor = tensor.clone()
        tensor[:, :, receiver.head] = kept["changed"][:, :, receiver.head]
        return tensor

    return {part: replace}


def receiver_stream(
    model: TransformerBridge, group: PromptGroup, edge: Edge, change: Tensor, mode: str
) -> Tensor:
    """The stream that the receiver reads, from the embedding on, with the sender's write changed.

    All other writes are those of the clean run, but in mode ``through-mlps`` MLPs recompute.
    """
    clean, sender = all_values(model, group.clean), edge.sender
    stream = output_of(model, clean, Node("input"))
    stream = stream + (change if sender.kind == "input" else 0)
    entering = stream
    for layer, part in parts_before(model, edge.receiver):
        if part == "attention":
            entering = stream
            written = clean[f"blocks.{layer}.attn.o.hook_out"]
        elif mode == "through-mlps":
            read = entering if is_parallel(model) else stream
            written = mlp_writes(model, layer, mlp_norm(model, layer)(read))
        else:
            written = clean[f"blocks.{layer}.mlp.hook_out"]
        if sender.layer == layer and (sender.kind == "mlp") == (part == "mlp"):
            written = written + change
        stream = joined(model, layer, part, stream, written)
    return stream


def parts_before(model: TransformerBridge, receiver: Receiver) -> Iterator[tuple[int, str]]:
    """What has written before a receiver reads."""
    last = model.cfg.n_layers if receiver.layer is None else receiver.layer
    for layer in range(last):
        yield layer, "attention"
        yield layer, "mlp"
    if receiver.kind == "mlp" and not is_parallel(model):
        yield last, "attention"


def joined(
    model: TransformerBridge, layer: int, part: str, stream: Tensor, written: Tensor
) -> Tensor:
    """The stream after attention or MLP, with the network's own layer norms."""
    block = model.blocks[layer]
    norms = family_of_model(model).norms
    if norms == "after":
        return (block.ln1 if part == "attention" else block.ln2).original_component(
            stream + written
        )
    if norms == "both":
        norm = block.ln1_post if part == "attention" else block.ln2_post
        return stream + norm.original_component(written)
    return stream + written


def mlp_norm(model: TransformerBridge, layer: int) -> Callable[[Tensor], Tensor]:
    """The layer norm before the MLP, or nothing where none is there."""
    block = model.blocks[layer]
    if family_of_model(model).norms == "after":
        return lambda stream: stream
    return (block.ln2 if hasattr(block, "ln2") else block.ln1).original_component


def mlp_writes(model: TransformerBridge, layer: int, normed: Tensor) -> Tensor:
    block: Any = model.blocks[layer]
    linear: list[Any] = [getattr(block.mlp, name, None) for name in ("in", "out")]
    name = family_of_model(model).name
    if name in ("OPT", "BERT", "RoBERTa"):
        hidden = torch.nn.functional.gelu(linear[0].original_component(normed))
        return linear[1].original_component(hidden)
    output = block.mlp(normed)
    return output[0] if isinstance(output, tuple) else output  # an MoE also says how it routed


def slow_patched_logits(
    model: TransformerBridge, group: PromptGroup, edges: set[Edge], layout: Layout
) -> Tensor:
    """Logits at the answer with a set of edges patched, one receiver at a time.

    What a receiver reads is joined write by write: from the corrupted run along patched edges,
    from this run along all others, and the attention biases, which belong to no sender.
    """
    corrupted = all_values(model, group.corrupted)
    written = {Node("input"): all_values(model, group.clean)["blocks.0.hook_in"]}

    def read(receiver: Receiver) -> Tensor:
        def sent(sender: Node) -> Tensor:
            patched = Edge(sender, receiver) in edges
            return output_of(model, corrupted, sender) if patched else written[sender]

        stream = sent(Node("input"))
        for layer, part in parts_before(model, receiver):
            if part == "mlp":
                total = sent(Node.mlp(layer))
            else:
                bias = getattr(model.blocks[layer].attn, "b_O", None)
                total = torch.zeros(model.cfg.d_model) if bias is None else bias
                for head in range(model.cfg.n_heads):
                    total = total + sent(Node.attention_head(layer, head))
            stream = joined(model, layer, part, stream, total)
        return stream

    for layer in range(model.cfg.n_layers):
        hooks: dict[str, Callable] = {}
        parts = {kind: [] for kind in "qkv"}
        for receiver in layout.attention_receivers(layer):
            with torch.no_grad():
                stream, kept = read(receiver), {}
            run(
                model,
                group.clean,
                {
                    f"blocks.{layer}.hook_in": lambda s, hook, stream=stream: stream,
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
        with torch.no_grad():
            stream = read(Receiver("mlp", layer))
            written[Node.mlp(layer)] = mlp_writes(model, layer, mlp_norm(model, layer)(stream))
    with torch.no_grad():
        stream = read(Receiver("logits"))
    end = family_of_model(model).end
    return run(model, group.clean, {end: lambda _, hook: stream}, group.answer)
