"""A GPT-2 whose weights are all zero until they are set by hand.

Its residual stream is divided into named spaces; every weight that is set reads from some of them
and writes to others. Two devices keep the arithmetic plain:

- A layer norm with an enormous epsilon divides by a constant, and its weight multiplies by the
  same constant: what is left of it is the subtraction of the mean.
- A last dimension, ``dump``, takes the negative of the sum of every write, so the mean is 0,
  whatever is ablated, and to zero as well.

The MLPs use ReLU, so that they compute what was meant exactly.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel

from circuitkd import load_model

EPSILON = 1e10


@dataclass(frozen=True)
class Head:
    """Views of one head's weights; what is written into them is written into the model."""

    q: Float[Tensor, "d_model d_head"]
    k: Float[Tensor, "d_model d_head"]
    v: Float[Tensor, "d_model d_head"]
    out: Float[Tensor, "d_head d_model"]


@dataclass(frozen=True)
class Mlp:
    """Views of one MLP's weights: out = relu(x read + bias) write."""

    read: Float[Tensor, "d_model d_mlp"]
    bias: Float[Tensor, "d_mlp"]
    write: Float[Tensor, "d_mlp d_model"]


class HandSet:
    """The weights of a model to be; ``bridge`` makes the model.

    ``spaces`` names the parts of the residual stream and gives their widths;
    ``d_head`` is the least that a head needs.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        vocabulary: int,
        positions: int,
        spaces: dict[str, int],
        d_mlp: int = 1,
        d_head: int = 1,
    ) -> None:
        used = sum(spaces.values()) + 1
        self.d_head = max(d_head, -(-used // heads))
        self.width = heads * self.d_head
        self.dump = self.width - 1
        self.layers, self.heads = layers, heads
        self._spaces: dict[str, slice] = {}
        first = 0
        for name, size in spaces.items():
            self._spaces[name] = slice(first, first + size)
            first += size
        config = GPT2Config(
            n_layer=layers,
            n_head=heads,
            n_embd=self.width,
            n_inner=d_mlp,
            vocab_size=vocabulary,
            n_positions=positions,
            activation_function="relu",
            layer_norm_epsilon=EPSILON,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
        )
        self._model = GPT2LMHeadModel(config).eval().requires_grad_(False)
        self._weights = dict(self._model.named_parameters())
        for name, weight in self._weights.items():
            is_norm = ".ln_" in name and name.endswith("weight")
            weight.fill_(EPSILON**0.5 if is_norm else 0.0)

    def __getitem__(self, space: str) -> slice:
        """The dimensions of a space."""
        return self._spaces[space]

    def at(self, space: str, index: int = 0) -> int:
        """One dimension of a space."""
        return self._spaces[space].start + index

    @property
    def tokens(self) -> Float[Tensor, "vocabulary d_model"]:
        return self._weights["transformer.wte.weight"]

    @property
    def places(self) -> Float[Tensor, "position d_model"]:
        return self._weights["transformer.wpe.weight"]

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary d_model"]:
        return self._weights["lm_head.weight"]

    def head(self, layer: int, head: int) -> Head:
        read = self._weights[f"transformer.h.{layer}.attn.c_attn.weight"]
        write = self._weights[f"transformer.h.{layer}.attn.c_proj.weight"]
        own = slice(head * self.d_head, (head + 1) * self.d_head)
        return Head(*(part[:, own] for part in read.split(self.width, dim=1)), out=write[own])

    def mlp(self, layer: int) -> Mlp:
        name = f"transformer.h.{layer}.mlp"
        return Mlp(
            self._weights[f"{name}.c_fc.weight"],
            self._weights[f"{name}.c_fc.bias"],
            self._weights[f"{name}.c_proj.weight"],
        )

    def scores(self, strength: float) -> float:
        """What a query must be, times a key of 1, for an attention score of ``strength``."""
        return strength * self.d_head**0.5

    def bridge(self) -> TransformerBridge:
        """The finished model, ready for analysis."""
        written = [self.tokens, self.places]
        for layer in range(self.layers):
            written += [self.head(layer, head).out for head in range(self.heads)]
            written.append(self.mlp(layer).write)
        for rows in written:
            rows[:, self.dump] -= rows.sum(1)
        return load_model(self._model)


def add_noise(hand: HandSet, *, scale: float, seed: int = 0) -> None:
    """Random weights in every head and MLP that is still empty: each writes a little everywhere.

    They attend and read at random; what they write is smaller than what the planted parts write by
    a factor of about ``scale``.
    """
    generator = torch.Generator().manual_seed(seed)

    def randomise(weight: Tensor, std: float) -> None:
        weight.copy_(std * torch.randn(weight.shape, generator=generator))

    for layer in range(hand.layers):
        for number in range(hand.heads):
            head = hand.head(layer, number)
            if not any(part.any() for part in (head.q, head.k, head.v, head.out)):
                for part in (head.q, head.k, head.v):
                    randomise(part, 1.0)
                randomise(head.out, scale / hand.d_head)
        mlp = hand.mlp(layer)
        if not mlp.read.any():
            randomise(mlp.read, 1.0)
            randomise(mlp.write, scale / len(mlp.write) ** 0.5)
