"""The weights of a GPT-2 or a Llama in one notation, as views that can be written to.

Every linear map is a matrix ``[in, out]``, applied as ``x @ matrix + bias``, whichever way round
the network stores it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from circuitkd.errors import ArchitectureError, InputError


@dataclass(frozen=True, eq=False)
class Affine:
    """One linear map of a network: views of its weights, so that in-place changes arrive there."""

    matrix: Float[Tensor, "in out"]
    bias: Float[Tensor, "out"] | None

    def columns(self, start: int, stop: int) -> "Affine":
        """The map to some of the outputs."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Affine(self.matrix[:, start:stop], bias)

    def read_in(self, change: Float[Tensor, "in in"]) -> None:
        """Apply ``change`` to the input first."""
        self.matrix.copy_(change @ self.matrix.double())

    def write_in(self, change: Float[Tensor, "out out"]) -> None:
        """Apply ``change`` to the output."""
        self.matrix.copy_(self.matrix.double() @ change)
        if self.bias is not None:
            self.bias.copy_(self.bias.double() @ change)

    def fold(self, gain: Float[Tensor, "in"], bias: Float[Tensor, "in"] | None) -> None:
        """Take in a norm's gain and bias, which come before it."""
        if bias is not None:
            if self.bias is None:
                raise ArchitectureError("A layer norm's bias cannot go into a map without one.")
            self.bias.add_((bias.double() @ self.matrix.double()).to(self.bias.dtype))
        self.matrix.mul_(gain[:, None])

    def order_outputs(self, order: Sequence[int]) -> None:
        """Output k becomes what output ``order[k]`` was."""
        index = torch.as_tensor(order, device=self.matrix.device)
        self.matrix.copy_(self.matrix[:, index].clone())
        if self.bias is not None:
            self.bias.copy_(self.bias[index].clone())

    def order_inputs(self, order: Sequence[int]) -> None:
        """Input k becomes what input ``order[k]`` was."""
        index = torch.as_tensor(order, device=self.matrix.device)
        self.matrix.copy_(self.matrix[index].clone())


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One block. ``mlp_in`` are the maps that make the neurons: one, or gate and up."""

    norms: tuple[nn.Module, nn.Module]
    query: Affine
    key: Affine
    value: Affine
    out: Affine
    mlp_in: tuple[Affine, ...]
    mlp_out: Affine

    @property
    def reads(self) -> tuple[tuple[nn.Module, tuple[Affine, ...]], ...]:
        """Each norm with what reads it."""
        return (self.norms[0], (self.query, self.key, self.value)), (self.norms[1], self.mlp_in)


@dataclass(frozen=True, eq=False)
class Weights:
    """A whole network. ``embeddings`` are all tables that are added up to enter block 0."""

    embeddings: tuple[Float[Tensor, "_ d_model"], ...]
    layers: tuple[LayerWeights, ...]
    final_norm: nn.Module
    n_heads: int
    n_kv_heads: int
    rotary: bool

    @property
    def d_model(self) -> int:
        return self.embeddings[0].shape[1]

    @property
    def d_head(self) -> int:
        return self.layers[0].query.matrix.shape[1] // self.n_heads

    @property
    def centres(self) -> bool:
        """Whether norms subtract the mean over the stream's coordinates."""
        return isinstance(self.final_norm, nn.LayerNorm)


def weights_of(model: PreTrainedModel) -> Weights:
    """Views of a network's weights.

    Raises:
        ArchitectureError: neither a GPT-2 nor a Llama with a language-model head.
    """
    if isinstance(model, GPT2LMHeadModel):
        return _gpt2(model)
    if isinstance(model, LlamaForCausalLM):
        return _llama(model)
    raise ArchitectureError(
        f"{type(model).__name__} cannot be rewritten; supported are GPT2LMHeadModel and "
        "LlamaForCausalLM."
    )


def head_of(model: PreTrainedModel) -> tuple[nn.Linear, bool]:
    """The language-model head, and whether its weights are those of the token embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ArchitectureError("The head must be a linear map without bias.")
    return head, head.weight is embedding.get_parameter("weight")


def norm_parameters(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Gain and bias of a norm, as views."""
    gain, bias = norm.get_parameter("weight"), getattr(norm, "bias", None)
    return gain.data, None if bias is None else bias.data


def check_orders(orders: Sequence[Sequence[int]], layers: int, length: int, what: str) -> None:
    """``InputError`` unless there is one permutation of ``length`` for each layer."""
    whole = list(range(length))
    if len(orders) != layers or any(sorted(order) != whole for order in orders):
        raise InputError(f"{layers} layers need as many orders, each of the {length} {what}.")


def _affine(module: nn.Module) -> Affine:
    weight, bias = module.get_parameter("weight").data, getattr(module, "bias", None)
    matrix = weight if isinstance(module, Conv1D) else weight.T
    return Affine(matrix, None if bias is None else bias.data)


def _gpt2(model: GPT2LMHeadModel) -> Weights:
    body, width = model.transformer, model.config.n_embd

    def layer(block: Any) -> LayerWeights:
        attention = _affine(block.attn.c_attn)
        query, key, value = (attention.columns(k * width, (k + 1) * width) for k in range(3))
        return LayerWeights(
            norms=(block.ln_1, block.ln_2),
            query=query,
            key=key,
            value=value,
            out=_affine(block.attn.c_proj),
            mlp_in=(_affine(block.mlp.c_fc),),
            mlp_out=_affine(block.mlp.c_proj),
        )

    return Weights(
        embeddings=(body.wte.weight.data, body.wpe.weight.data),
        layers=tuple(map(layer, body.h)),
        final_norm=body.ln_f,
        n_heads=model.config.n_head,
        n_kv_heads=model.config.n_head,
        rotary=False,
    )


def _llama(model: LlamaForCausalLM) -> Weights:
    body, config = model.model, model.config

    def layer(block: Any) -> LayerWeights:
        attention, mlp = block.self_attn, block.mlp
        return LayerWeights(
            norms=(block.input_layernorm, block.post_attention_layernorm),
            query=_affine(attention.q_proj),
            key=_affine(attention.k_proj),
            value=_affine(attention.v_proj),
            out=_affine(attention.o_proj),
            mlp_in=(_affine(mlp.gate_proj), _affine(mlp.up_proj)),
            mlp_out=_affine(mlp.down_proj),
        )

    return Weights(
        embeddings=(body.embed_tokens.weight.data,),
        layers=tuple(map(layer, body.layers)),
        final_norm=body.norm,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        rotary=True,
    )
