"""Gradients of the metric at every receiver's input and every sender's output.

One forward pass with hooks and one backward pass. Where a receiver and others read the same
stream, the hook gives the receiver a view of its own, so that only what goes through the receiver
counts. Queries, keys and values are kept as narrow as they are (d_head); the way back through the
projection and the layer norm is taken one layer at a time, when it is needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits._joins import PARTS
from circuitkd.circuits._senders import Written
from circuitkd.circuits.edges import ATTENTION_KINDS, layout_of
from circuitkd.circuits.engine import Edit, Replay, hooked
from circuitkd.errors import InputError
from circuitkd.metrics import logit_difference, probability_difference
from circuitkd.models import norm_gain
from circuitkd.prompts import PromptGroup


@dataclass(frozen=True)
class Gradients:
    """Gradients at named places (``q.3``, ``mlp_in.3``, ``z.3``, ``end``), and what the run did.

    ``norm`` holds ``before.normalized.3`` and ``before.scale.3``, of the layer norm before
    attention: its input (centred, unless it is an RMS norm) over its scale, and the scale; and the
    same of the norms, if any, with which attention (``attention.scale.3``) and MLP
    (``mlp.scale.3``) join the stream. ``written`` are the senders' outputs.
    """

    gradient: dict[str, Tensor]
    norm: dict[str, Tensor]
    written: Written


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
        places: any of ``q``, ``k``, ``v``, ``mlp_in``, ``z``, ``mlp``; ``end`` always.
    """
    points = {
        "mlp_in": replay.family.mlp_input,
        "z": "attn.hook_z",
        "mlp": "mlp.hook_out",
        **{kind: f"attn.{kind}.hook_out" for kind in ATTENTION_KINDS},
    }
    value: dict[str, Tensor] = {}
    norm: dict[str, Tensor] = {}
    edits: dict[str, Edit] = {}
    for layer in range(replay.n_layers):
        for place in dict.fromkeys((*places, "z", "mlp")):
            edits[f"blocks.{layer}.{points[place]}"] = _own_view(value, f"{place}.{layer}")
        for use, name in _norms(replay).items():
            for part in ("normalized", "scale"):
                edits[f"blocks.{layer}.{name}.hook_{part}"] = _keep(norm, f"{use}.{part}.{layer}")
    edits[replay.family.end] = _own_view(value, "end")
    # Not contiguous, it would be multiplied with a copy of the unembedding for each prompt.
    edits["unembed.hook_in"] = lambda stream: stream[:, replay.answer_slice].contiguous()
    start = embed.detach().requires_grad_()
    edits["blocks.0.hook_in"] = lambda _stream: start
    with torch.enable_grad(), hooked(edits, replay.model):
        tokens = _ordinary(group.clean[prompts], replay.device)
        logits = replay.model(tokens, use_cache=False)[:, -1]
        total = _metric(logits, group, metric, prompts).sum()
        wanted = {name: view for name, view in value.items() if name.split(".")[0] in places}
        wanted["end"] = value["end"]
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    found = {
        name: torch.zeros_like(wanted[name]) if gradient is None else gradient
        for name, gradient in zip(wanted, gradients, strict=True)
    }
    for name in found:
        if name.startswith("mlp"):  # of all prompts in one row, in some networks
            found[name] = found[name].reshape(embed.shape)
    return Gradients(found, norm, _written(replay, embed, value))


def _norms(replay: Replay) -> dict[str, str]:
    """Layer norms of a block whose working must be known: what for, and their names."""
    before = {} if replay.family.norms == "after" else {"before": "ln1"}
    if replay.joins.additive:
        return before
    return before | {part: replay.joins.norm_name(part) for part in PARTS}


def _written(replay: Replay, embed: Tensor, value: dict[str, Tensor]) -> Written:
    layers = range(replay.n_layers)
    z = [value[f"z.{layer}"].detach().flatten(2) for layer in layers]
    return Written(
        embed,
        tuple(one.unflatten(2, replay.W_O(layer).shape[:2]) for layer, one in enumerate(z)),
        tuple(value[f"mlp.{layer}"].detach().reshape(embed.shape) for layer in layers),
    )


@torch.no_grad()
def receiver_gradients(
    replay: Replay, layer: int, seen: Gradients
) -> Float[Tensor, "batch receiver pos d_model"]:
    """Gradient at the input residual stream, before a layer norm, of each query, key and value.

    In the order of ``Layout.attention_receivers``. The layer norm is y = w x / |x| up to constants,
    with x centred unless it is an RMS norm; back through it a gradient loses what lies along x.
    """
    along, scale = (
        seen.norm.get(f"before.normalized.{layer}"),
        seen.norm.get(f"before.scale.{layer}"),
    )
    weights = _normed_weights(replay, layer)
    n_receivers = sum(len(weight) for weight in weights)
    like = seen.written.embed if along is None else along
    found = like.new_empty(n_receivers, *like.shape)  # receiver first: one matrix each
    first = 0
    for kind, weight in zip(ATTENTION_KINDS, weights, strict=True):
        gradient = seen.gradient[f"{kind}.{layer}"].flatten(2)
        gradient = gradient if scale is None else gradient / scale  # in the norm's dtype
        gradient = rearrange(gradient, "b pos (h d_head) -> h (b pos) d_head", h=len(weight))
        own = found[first : first + len(weight)]
        torch.bmm(gradient, weight.mT.to(found.dtype), out=own.flatten(1, 2))
        first += len(weight)
    if along is not None:
        _lose_what_lies_along(found, along)
    return rearrange(found, "receiver b pos d -> b receiver pos d")


@torch.no_grad()
def mlp_gradient(replay: Replay, layer: int, seen: Gradients) -> Float[Tensor, "batch pos d_model"]:
    """Gradient at the residual stream that the MLP reads, before its layer norm.

    Where the norm is shared with attention, the network shows the MLP's own input behind it only.
    """
    gradient = seen.gradient[f"mlp_in.{layer}"]
    if not replay.family.shared_norm:
        return gradient
    along, scale = seen.norm[f"before.normalized.{layer}"], seen.norm[f"before.scale.{layer}"]
    norm: Any = replay.model.blocks[layer].ln1
    gradient = gradient * norm_gain(replay.model, norm) / scale
    if not norm.uses_rms_norm:
        gradient = gradient - gradient.mean(-1, keepdim=True)
    _lose_what_lies_along(gradient[None], along)
    return gradient


def _lose_what_lies_along(
    gradients: Float[Tensor, "receiver batch pos d_model"],
    along: Float[Tensor, "batch pos d_model"],
) -> None:
    size = einsum(gradients, along, "receiver b pos d, b pos d -> receiver b pos")
    gradients.addcmul_(along, size[..., None] / along.shape[-1], value=-1)


def _normed_weights(replay: Replay, layer: int) -> list[Float[Tensor, "head d_model d_head"]]:
    """Weights of queries, keys, values on the normalised stream, times the layer norm's own."""
    block = replay.model.blocks[layer]
    if replay.family.norms == "after":
        return [getattr(block.attn, f"W_{kind.upper()}").detach() for kind in ATTENTION_KINDS]
    norm: Any = block.ln1
    gain = norm_gain(replay.model, norm)
    weights = []
    for kind in ATTENTION_KINDS:
        weight = getattr(block.attn, f"W_{kind.upper()}").detach() * gain[:, None]
        if not norm.uses_rms_norm:
            weight = weight - weight.mean(1, keepdim=True)
        weights.append(weight)
    return weights


def edge_products(
    replay: Replay,
    seen: Gradients,
    changes: Float[Tensor, "batch sender pos d_model"],
) -> Float[Tensor, "batch edge"]:
    """For every edge, the sender's change times the receiver's gradient, summed over positions.

    In the order of ``Layout.edges``. One layer's gradients are held at a time. Where joins are more
    than a sum, what a receiver reads changes by the sender's change carried along them.
    """
    layout, joins, at = layout_of(replay.model), replay.joins, replay.answer_slice
    changes = changes if joins.additive else changes.clone()
    parts = []
    for layer in range(replay.n_layers):
        attention, mlp = layout.attention_receivers(layer), layout.layer_receivers(layer)[-1]
        earlier, before = layout.n_before(attention[0]), layout.n_before(mlp)
        gradients = receiver_gradients(replay, layer, seen)
        parts.append(_products(gradients, changes[:, :earlier]))
        joins.carry(layer, "attention", changes, earlier, layout.n_heads, seen.norm)
        read = mlp_gradient(replay, layer, seen)[:, None]
        parts.append(_products(read, changes[:, :before]))
        joins.carry(layer, "mlp", changes, before, 1, seen.norm)
    parts.append(_products(seen.gradient["end"][:, None, at], changes[:, :, at]))
    return torch.cat(parts, 1)


def _products(
    gradients: Float[Tensor, "batch receiver pos d_model"],
    changes: Float[Tensor, "batch sender pos d_model"],
) -> Float[Tensor, "batch edge"]:
    products = gradients.flatten(2).to(changes.dtype) @ changes.flatten(2).transpose(1, 2)
    return products.flatten(1).float()


def _metric(
    logits: Float[Tensor, "batch vocab"], group: PromptGroup, metric: str, prompts: slice
) -> Float[Tensor, "batch"]:
    device = logits.device
    if metric == "logit_difference":
        correct, incorrect = (
            _ordinary(answer[prompts], device) for answer in (group.correct, group.incorrect)
        )
        return logit_difference(logits, correct, incorrect)
    if (
        metric == "probability_difference"
        and group.candidates is not None
        and (group.valid is not None)
    ):
        valid = _ordinary(group.valid[prompts], device)
        return probability_difference(logits, _ordinary(group.candidates, device), valid)
    raise InputError(f"These prompts cannot be measured with metric {metric!r}.")


def _ordinary(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that autograd can keep, even where the prompts were drawn in inference mode."""
    return tensor.to(device).clone()


def _own_view(value: dict[str, Tensor], name: str) -> Edit:
    def keep(tensor: Tensor) -> Tensor:
        value[name] = tensor.view_as(tensor)
        return value[name]

    return keep


def _keep(kept: dict[str, Tensor], name: str) -> Edit:
    def keep(tensor: Tensor) -> None:
        kept[name] = tensor.detach()

    return keep
