"""Gradients of the metric at every receiver's input and every sender's output.

One forward pass with hooks and one backward pass. Where a receiver and others read the same
stream, the hook gives the receiver a view of its own, so that only what goes through the receiver
counts. Queries, keys and values are kept as narrow as they are (d_head); the way back through the
projection and the layer norm is taken one layer at a time, when it is needed.
"""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits.edges import ATTENTION_KINDS, layout_of
from circuitkd.circuits.engine import Edit, Replay, hooked
from circuitkd.errors import InputError
from circuitkd.metrics import logit_difference, probability_difference
from circuitkd.prompts import PromptGroup


@dataclass(frozen=True)
class Gradients:
    """Gradients at named places (``q.3``, ``mid.3``, ``z.3``, ``end``), and streams ``pre.3``."""

    stream: dict[str, Tensor]
    gradient: dict[str, Tensor]


def metric_gradients(
    replay: Replay,
    group: PromptGroup,
    metric: str,
    prompts: slice,
    embed: Float[Tensor, "batch pos d_model"],
    places: tuple[str, ...],
) -> Gradients:
    """Run from ``embed`` and differentiate each prompt's metric.

    Args:
        replay: the engine, which also checks the network.
        group: the prompts' answers.
        metric: what is differentiated.
        prompts: the slice of the group.
        embed: the residual stream that enters block 0.
        places: any of ``pre``, ``q``, ``k``, ``v``, ``mid``, ``z``, ``mlp``; ``end`` always.
    """
    points = {
        "pre": "ln1.hook_in",
        "mid": replay.family.mlp_input,
        "z": "attn.hook_z",
        "mlp": "mlp.hook_out",
        **{kind: f"attn.{kind}.hook_out" for kind in ATTENTION_KINDS},
    }
    value: dict[str, Tensor] = {}
    edits: dict[str, Edit] = {
        f"blocks.{layer}.{points[place]}": _own_view(value, f"{place}.{layer}")
        for layer in range(replay.n_layers)
        for place in places
    }
    edits["ln_final.hook_in"] = _own_view(value, "end")
    edits["unembed.hook_in"] = lambda stream: stream[:, -1:]
    start = embed.detach().requires_grad_()
    edits["blocks.0.hook_in"] = lambda _stream: start
    with torch.enable_grad(), hooked(edits, replay.model):
        tokens = group.clean[prompts].to(replay.device)
        logits = replay.model(tokens, use_cache=False)[:, -1]
        total = _metric(logits, group, metric, prompts).sum()
        gradients = torch.autograd.grad(total, list(value.values()), allow_unused=True)
    found = {
        name: torch.zeros_like(value[name]) if gradient is None else gradient
        for name, gradient in zip(value, gradients, strict=True)
    }
    streams = {name: kept.detach() for name, kept in value.items() if name.startswith("pre")}
    return Gradients(streams, found)


def receiver_gradients(
    replay: Replay, layer: int, seen: Gradients
) -> Float[Tensor, "batch receiver pos d_model"]:
    """Gradient at the input residual stream, before the layer norm, of each query, key and value.

    In the order of ``Layout.attention_receivers``.
    """
    block = replay.model.blocks[layer]
    parts = []
    for kind in ATTENTION_KINDS:
        weight = getattr(block.attn, f"W_{kind.upper()}").detach()
        gradient = seen.gradient[f"{kind}.{layer}"].flatten(2).unflatten(2, (len(weight), -1))
        parts.append(einsum(gradient, weight, "b pos h d_head, h d d_head -> b h pos d"))
    after_norm = torch.cat(parts, 1)
    with torch.enable_grad():
        pre = seen.stream[f"pre.{layer}"][:, None].expand_as(after_norm).flatten(0, 1)
        pre = pre.detach().requires_grad_()
        (before_norm,) = torch.autograd.grad(block.ln1(pre), pre, after_norm.flatten(0, 1))
    return before_norm.unflatten(0, after_norm.shape[:2])


def edge_products(
    replay: Replay,
    seen: Gradients,
    changes: Float[Tensor, "batch sender pos d_model"],
) -> Float[Tensor, "batch edge"]:
    """For every edge, the sender's change times the receiver's gradient, summed over positions.

    In the order of ``Layout.edges``. One layer's gradients are held at a time.
    """
    layout = layout_of(replay.model)
    parts = []
    for layer in range(replay.n_layers):
        attention, mlp = layout.attention_receivers(layer), layout.layer_receivers(layer)[-1]
        gradients = receiver_gradients(replay, layer, seen)
        parts.append(_products(gradients, changes[:, : layout.n_before(attention[0])]))
        mid = seen.gradient[f"mid.{layer}"][:, None]
        parts.append(_products(mid, changes[:, : layout.n_before(mlp)]))
    parts.append(_products(seen.gradient["end"][:, None, -1:], changes[:, :, -1:]))
    return torch.cat(parts, 1)


def _products(
    gradients: Float[Tensor, "batch receiver pos d_model"],
    changes: Float[Tensor, "batch sender pos d_model"],
) -> Float[Tensor, "batch edge"]:
    products = gradients.flatten(2) @ changes.flatten(2).transpose(1, 2)
    return products.flatten(1).float()


def _metric(
    logits: Float[Tensor, "batch vocab"], group: PromptGroup, metric: str, prompts: slice
) -> Float[Tensor, "batch"]:
    device = logits.device
    if metric == "logit_difference":
        correct, incorrect = group.correct[prompts], group.incorrect[prompts]
        return logit_difference(logits, correct.to(device), incorrect.to(device))
    if (
        metric == "probability_difference"
        and group.candidates is not None
        and (group.valid is not None)
    ):
        valid = group.valid[prompts].to(device)
        return probability_difference(logits, group.candidates.to(device), valid)
    raise InputError(f"These prompts cannot be measured with metric {metric!r}.")


def _own_view(value: dict[str, Tensor], name: str) -> Edit:
    def keep(tensor: Tensor) -> Tensor:
        value[name] = tensor.view_as(tensor)
        return value[name]

    return keep
