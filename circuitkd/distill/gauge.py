"""Rewriting a network without changing its function.

A network's weights are one of many descriptions of the same function. What compares two networks
should not depend on which one was chosen; these rewritings are how to test that.

- ``rotate_residual``: the residual stream in another orthonormal basis, ``h -> h Q``. Norms keep
  no gain or bias of their own (they are folded into what reads them), every read becomes
  ``Qᵀ W``, every write ``W Q``. An RMS norm commutes with every orthogonal Q. A layer norm, which
  subtracts the mean over coordinates, commutes with those Q that leave the all-ones direction
  alone, and GPT-2 has no other norm to be given; so its rotations are those, and exact, centred or
  not. Tied embeddings stay tied where the final norm's gain is the same for all coordinates;
  otherwise the head takes that gain in, and is untied.
- ``permute_heads``: heads of a layer in another order; under grouped-query attention whole groups
  move, and heads within their group.
- ``change_value_bases``: each head's values in another basis, any invertible one:
  ``v -> v B``, ``W_O -> B⁻¹ W_O``; under grouped-query attention one basis a group.
- ``change_query_bases``: queries and keys, ``q -> q B``, ``k -> k B⁻ᵀ``. Rotary positions turn
  pairs of coordinates (i, i + d_head/2); there B must commute with that, which leaves one rotation
  and one scale a pair.
- ``permute_neurons``: neurons of an MLP in another order.

Arithmetic is in float64, stored in the network's own dtype: in float32 logits move by about 1e-6
of their size. Formulas: Elhage et al. 2021 (heads); Ashkboos et al. 2024, SliceGPT (rotations).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from circuitkd.distill._draws import (
    head_order,
    query_basis,
    random_order,
    random_rotation,
    value_basis,
)
from circuitkd.distill._weights import (
    Affine,
    Weights,
    check_orders,
    head_of,
    norm_parameters,
    weights_of,
)
from circuitkd.errors import InputError
from circuitkd.nodes import Node

Network = TypeVar("Network", bound=PreTrainedModel)
__all__ = [
    "PARTS",
    "Gauge",
    "change_query_bases",
    "change_value_bases",
    "permute_heads",
    "permute_neurons",
    "random_gauge",
    "random_rotation",
    "rotate_residual",
]

Orders = Sequence[Sequence[int]]
Bases = Sequence[Float[Tensor, "kv_head d_head d_head"]]

PARTS = ("rotation", "heads", "values", "queries", "neurons")
_EXACT = 1e-6


@dataclass(frozen=True, eq=False)
class Gauge:
    """A rewritten network, and how it was rewritten; parts that were left alone are ``None``.

    ``head_orders`` and ``neuron_orders``: in each layer, number k of the new network was number
    ``order[k]`` of the old one.
    """

    model: PreTrainedModel
    rotation: Float[Tensor, "d_model d_model"] | None
    head_orders: tuple[tuple[int, ...], ...] | None
    neuron_orders: tuple[tuple[int, ...], ...] | None

    @property
    def origin(self) -> Mapping[Node, Node]:
        """For each head of the new network the head of the old one that it was."""
        layers = self.head_orders or ()
        return {
            Node.attention_head(layer, new): Node.attention_head(layer, old)
            for layer, order in enumerate(layers)
            for new, old in enumerate(order)
        }


def random_gauge(model: PreTrainedModel, seed: int = 0, *, parts: Sequence[str] = PARTS) -> Gauge:
    """The same function in a random description.

    Args:
        model: a GPT-2 or Llama in memory; it stays as it is.
        seed: of all random choices.
        parts: what is rewritten, of ``PARTS``. Bases inside heads are rotations times scales
            between 1/2 and 2.

    Raises:
        InputError: an unknown part.
        ArchitectureError: an unsupported network.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=9)).eval()
    >>> gauge = random_gauge(model, seed=1)
    >>> tokens = torch.tensor([[1, 5, 3]])
    >>> bool((gauge.model(tokens).logits - model(tokens).logits).abs().max() < 1e-5)
    True
    >>> gauge.origin[Node.parse("a0.h0")]
    Node(kind='head', layer=0, head=1)
    """
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"Unknown parts {sorted(unknown)}: choose of {', '.join(PARTS)}.")
    generator = torch.Generator().manual_seed(seed)
    weights = weights_of(model)
    n_layers = len(weights.layers)
    rotation = head_orders = neuron_orders = None
    if "rotation" in parts:
        rotation = random_rotation(weights.d_model, generator, fix_ones=weights.centres)
        model = rotate_residual(model, rotation)
    if "values" in parts:
        model = change_value_bases(
            model, [value_basis(weights, generator) for _ in range(n_layers)]
        )
    if "queries" in parts:
        model = change_query_bases(
            model, [query_basis(weights, generator) for _ in range(n_layers)]
        )
    if "heads" in parts:
        head_orders = tuple(head_order(weights, generator) for _ in range(n_layers))
        model = permute_heads(model, head_orders)
    if "neurons" in parts:
        widths = [layer.mlp_out.matrix.shape[0] for layer in weights.layers]
        neuron_orders = tuple(random_order(width, generator) for width in widths)
        model = permute_neurons(model, neuron_orders)
    return Gauge(model, rotation, head_orders, neuron_orders)


@torch.no_grad()
def rotate_residual(model: Network, rotation: Float[Tensor, "d_model d_model"]) -> Network:
    """The network with residual stream ``h Q`` where it was ``h``; see the module.

    Raises:
        InputError: Q is not orthogonal, of another width, or (with layer norms) moves the all-ones
            direction; or the final layer norm has a bias where its gain is 0, which no weight of
            the rotated network could hold.
        ArchitectureError: an unsupported network.
    """
    model = copy.deepcopy(model)
    weights = weights_of(model)
    rotation = rotation.detach().double().to(weights.embeddings[0].device)
    _check_rotation(rotation, weights)
    _fold_final_norm(model, weights)
    head, tied = head_of(model)
    for table in (*weights.embeddings, *([] if tied else [head.weight.data])):
        table.copy_(table.double() @ rotation)
    bias = norm_parameters(weights.final_norm)[1]
    if bias is not None:
        bias.copy_(bias.double() @ rotation)
    for layer in weights.layers:
        for norm, readers in layer.reads:
            _fold_norm(norm, readers)
            for reader in readers:
                reader.read_in(rotation.T)
        layer.out.write_in(rotation)
        layer.mlp_out.write_in(rotation)
    return model


@torch.no_grad()
def permute_heads(model: Network, orders: Orders) -> Network:
    """Head k of layer l becomes what head ``orders[l][k]`` was.

    Raises:
        InputError: not a permutation for each layer, or one that takes groups apart.
        ArchitectureError: an unsupported network.
    """
    model = copy.deepcopy(model)
    weights = weights_of(model)
    check_orders(orders, len(weights.layers), weights.n_heads, "heads")
    size = weights.n_heads // weights.n_kv_heads
    for layer, order in zip(weights.layers, orders, strict=True):
        groups = [order[first] // size for first in range(0, len(order), size)]
        if any(head // size != groups[place // size] for place, head in enumerate(order)):
            raise InputError(
                f"Order {list(order)} takes heads out of their groups of {size}, which share keys "
                "and values: move whole groups, and heads within them."
            )
        heads = _widened(order, weights.d_head)
        layer.query.order_outputs(heads)
        layer.out.order_inputs(heads)
        for shared in (layer.key, layer.value):
            shared.order_outputs(_widened(groups, weights.d_head))
    return model


@torch.no_grad()
def change_value_bases(model: Network, bases: Bases) -> Network:
    """Values ``v B`` where they were ``v``, in each head (each group); one set of bases a layer.

    Raises:
        InputError: bases of another number or shape, or not invertible.
        ArchitectureError: an unsupported network.
    """
    model = copy.deepcopy(model)
    weights = weights_of(model)
    size = weights.n_heads // weights.n_kv_heads
    for layer, basis in zip(weights.layers, _checked(bases, weights), strict=True):
        layer.value.write_in(torch.block_diag(*basis))
        inverse = torch.linalg.inv(basis).repeat_interleave(size, 0)
        layer.out.read_in(torch.block_diag(*inverse))
    return model


@torch.no_grad()
def change_query_bases(model: Network, bases: Bases) -> Network:
    """Queries ``q B`` and keys ``k B⁻ᵀ``, in each head (each group); one set of bases a layer.

    Raises:
        InputError: bases of another number or shape, not invertible, or not commuting with rotary
            positions.
        ArchitectureError: an unsupported network.
    """
    model = copy.deepcopy(model)
    weights = weights_of(model)
    size = weights.n_heads // weights.n_kv_heads
    for layer, basis in zip(weights.layers, _checked(bases, weights), strict=True):
        if weights.rotary and not _commutes_with_positions(basis):
            raise InputError(
                "A basis of queries does not commute with rotary positions: only a rotation and a "
                "scale of each pair of coordinates (i, i + d_head/2) do."
            )
        layer.query.write_in(torch.block_diag(*basis.repeat_interleave(size, 0)))
        layer.key.write_in(torch.block_diag(*torch.linalg.inv(basis).mT))
    return model


@torch.no_grad()
def permute_neurons(model: Network, orders: Orders) -> Network:
    """Neuron k of the MLP of layer l becomes what neuron ``orders[l][k]`` was.

    Raises:
        InputError: not a permutation for each layer.
        ArchitectureError: an unsupported network.
    """
    model = copy.deepcopy(model)
    weights = weights_of(model)
    width = weights.layers[0].mlp_out.matrix.shape[0]
    check_orders(orders, len(weights.layers), width, "neurons")
    for layer, order in zip(weights.layers, orders, strict=True):
        for makes in layer.mlp_in:
            makes.order_outputs(order)
        layer.mlp_out.order_inputs(order)
    return model


# ---------------------------------------------------------------------- norms


def _fold_norm(norm: nn.Module, readers: Sequence[Affine]) -> None:
    gain, bias = norm_parameters(norm)
    for reader in readers:
        reader.fold(gain, bias)
    gain.fill_(1.0)
    if bias is not None:
        bias.zero_()


def _fold_final_norm(model: PreTrainedModel, weights: Weights) -> None:
    """Make the final gain constant.

    The bias stays in the norm, because the head has none to take it: b' with W g b' = W b.
    """
    gain, bias = norm_parameters(weights.final_norm)
    if bool((gain == gain[0]).all()):
        return
    head, tied = head_of(model)
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    if bias is not None:
        lost = (gain == 0) & (bias != 0)
        if bool(lost.any()):
            raise InputError("The final layer norm has a bias where its gain is 0: not rotatable.")
        bias.copy_(torch.where(bias == 0, 0, bias.double() / gain.double()))
    head.weight.data.mul_(gain)
    gain.fill_(1.0)


def _check_rotation(rotation: Float[Tensor, "_ _"], weights: Weights) -> None:
    width = weights.d_model
    if rotation.shape != (width, width):
        raise InputError(f"The rotation must be {width} × {width}, not {tuple(rotation.shape)}.")
    one = torch.eye(width, dtype=rotation.dtype, device=rotation.device)
    if not (rotation @ rotation.T - one).abs().max() < _EXACT:
        raise InputError("The matrix is not orthogonal, so norms do not commute with it.")
    if weights.centres and not (rotation.sum(1) - 1).abs().max() < _EXACT:
        raise InputError(
            "The rotation moves the all-ones direction, so layer norms do not commute with it: "
            "use random_rotation(..., fix_ones=True)."
        )


# ---------------------------------------------------------------------- inside heads


def _checked(bases: Bases, weights: Weights) -> list[Float[Tensor, "kv_head d_head d_head"]]:
    shape = (weights.n_kv_heads, weights.d_head, weights.d_head)
    if len(bases) != len(weights.layers) or any(basis.shape != shape for basis in bases):
        raise InputError(f"{len(weights.layers)} layers need as many bases of shape {shape}.")
    device = weights.embeddings[0].device
    found = [basis.detach().double().to(device) for basis in bases]
    if not all(bool((torch.linalg.cond(basis) < 1 / _EXACT).all()) for basis in found):
        raise InputError("A basis is not invertible, or so badly that the function would change.")
    return found


def _commutes_with_positions(basis: Float[Tensor, "kv_head d_head d_head"]) -> bool:
    half = basis.shape[-1] // 2
    (same, cross), (back, again) = (
        (rows[..., :half], rows[..., half:]) for rows in (basis[:, :half], basis[:, half:])
    )
    off = ~torch.eye(half, dtype=torch.bool, device=basis.device)
    parts = (same - again, cross + back, same[:, off], cross[:, off])
    return all(float(part.abs().max()) < _EXACT for part in parts if part.numel())


def _widened(order: Sequence[int], width: int) -> list[int]:
    """The order of coordinates when blocks of ``width`` move together."""
    index = torch.arange(len(order) * width).view(len(order), width)[list(order)]
    return rearrange(index, "block place -> (block place)").tolist()
