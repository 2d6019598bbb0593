"""RASP programs that Tracr compiled, as GPT-2 models: reverse, and the share of x.

``scripts/compile_programs.py`` made the weights and says how. Tracr's transformer has no layer
norms, uses ReLU, and was compiled with a causal mask, so ``hand_set.HandSet`` holds it exactly; the
heads are wider than Tracr's, and the dimensions beyond its own hold zeros.

The answer is read at the last position, which sees the whole prompt. ``reverse`` answers with the
first token: its logit is 1, that of all others 0. ``x_proportion`` writes one number, and the
unembedding of ``x`` reads it: logit(x) - logit(y) is the share of x in the prompt.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hand_set import HandSet
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.edges import Layout, Receiver, layout_of
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

DATA = Path(__file__).parent / "data"
PROGRAMS = ("reverse", "x_proportion")
BOS, PAD = "compiler_bos", "compiler_pad"


@dataclass(frozen=True)
class Compiled:
    """One program: its weights, and what Tracr says about them."""

    about: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def residual(self) -> list[str]:
        """The meaning of each dimension of the residual stream."""
        return self.about["residual"]

    def ids(self, words: list[str]) -> list[int]:
        """Token ids, BOS first."""
        return [self.about["tokens"][word] for word in (BOS, *words)]


def load_program(name: str) -> Compiled:
    about = json.loads((DATA / "compiled_programs.json").read_text())[name]
    return Compiled(about, load_file(DATA / f"compiled_{name}.safetensors"))


def compiled_model(name: str) -> TransformerBridge:
    """The program as a GPT-2."""
    program = load_program(name)
    about, weights = program.about, program.weights
    n = len(program.residual)
    hand = HandSet(
        layers=about["layers"],
        heads=about["heads"],
        vocabulary=len(about["tokens"]),
        positions=about["max_length"] + 1,
        spaces={"residual": n},
        d_mlp=weights["transformer/layer_0/mlp/linear_1"].shape[1],
    )
    hand.tokens[:, :n] = weights["token_embed"]
    hand.places[:, :n] = weights["pos_embed"]
    for value, label in about["output"].items():
        token = about["tokens"][value or "x"]
        hand.unembedding[token, program.residual.index(label)] = 1.0
    for layer in range(about["layers"]):
        _set_layer(hand, layer, n, about["key_size"], weights)
    return hand.bridge()


def _set_layer(
    hand: HandSet, layer: int, n: int, key_size: int, weights: dict[str, Tensor]
) -> None:
    part = f"transformer/layer_{layer}/"
    for number in range(hand.heads):
        head, own = hand.head(layer, number), slice(number * key_size, (number + 1) * key_size)
        # Both divide scores by the root of their heads' width.
        scale = hand.scores(1.0) / key_size**0.5
        head.q[:n, :key_size] = scale * weights[part + "attn/query"][:, own]
        head.k[:n, :key_size] = weights[part + "attn/key"][:, own]
        head.v[:n, :key_size] = weights[part + "attn/value"][:, own]
        head.out[:key_size, :n] = weights[part + "attn/linear"][own]
    mlp = hand.mlp(layer)
    mlp.read[:n] = weights[part + "mlp/linear_1"]
    mlp.write[:, :n] = weights[part + "mlp/linear_2"]


def reverse_prompts(corruption: str, n: int = 12, *, seed: int = 0) -> Prompts:
    """Prompts of 3 and of 4 different tokens.

    ``corruption="tokens"``: every token is another one. ``"length"``: one token between the first
    and the last is a pad, which the program does not count. The wrong answer is the second token.
    """
    program, generator = load_program("reverse"), torch.Generator().manual_seed(seed)
    letters = program.about["vocabulary"]
    groups = []
    halves = torch.arange(n).split([n // 2, n - n // 2])
    for length, index in zip((3, 4), halves, strict=True):
        if len(index) == 0:
            continue
        clean = _permutations(len(index), len(letters), generator)[:, :length]
        means = _permutations(64, len(letters), generator)[:, :length]
        if corruption == "tokens":
            shift = torch.randint(1, len(letters), clean.shape, generator=generator)
            corrupted = (clean + shift) % len(letters)
        else:
            corrupted = _with_a_pad(clean, len(letters), generator)
            means = _with_a_pad(means, len(letters), generator)
        words = [*letters, PAD]
        tokens = [_encoded(program, words, rows) for rows in (clean, corrupted, means)]
        groups.append(_group(tokens, index, tokens[0][:, 1], tokens[0][:, 2]))
    return Prompts(f"reverse, {corruption}", None, "logit_difference", None, seed, tuple(groups))


def proportion_prompts(clean_x: int = 4, corrupted_x: int = 0, n: int = 12) -> Prompts:
    """Prompts of 5 tokens, some of them x, at random places.

    Where the corrupted prompts have more x, they have them at the clean prompts' places too; where
    they have fewer, only there.
    """
    program, generator = load_program("x_proportion"), torch.Generator().manual_seed(0)
    words, length = program.about["vocabulary"], program.about["max_length"]

    def rows(rank: Int[Tensor, "row pos"], count: int) -> Int[Tensor, "row pos"]:
        others = torch.randint(1, len(words), rank.shape, generator=generator)
        return torch.where(rank < count, words.index("x"), others)

    rank = _permutations(n, length, generator)
    mean_rank = _permutations(64, length, generator)
    tokens = [
        _encoded(program, words, part)
        for part in (
            rows(rank, clean_x),
            rows(rank, corrupted_x),
            rows(mean_rank, corrupted_x),
        )
    ]
    answers = [torch.full((n,), program.about["tokens"][word]) for word in ("x", "y")]
    group = _group(tokens, torch.arange(n), *answers)
    return Prompts("x_proportion", None, "logit_difference", None, 0, (group,))


def _permutations(rows: int, size: int, generator: torch.Generator) -> Int[Tensor, "row size"]:
    return torch.rand(rows, size, generator=generator).argsort(1)


def _with_a_pad(
    rows: Int[Tensor, "row pos"], pad: int, generator: torch.Generator
) -> Int[Tensor, "row pos"]:
    """The word ``pad`` at one inner place of each row."""
    padded = rows.clone()
    places = torch.randint(1, rows.shape[1] - 1, (len(rows),), generator=generator)
    padded[torch.arange(len(rows)), places] = pad
    return padded


def _encoded(
    program: Compiled, words: list[str], rows: Int[Tensor, "row pos"]
) -> Int[Tensor, "row pos_and_bos"]:
    return torch.tensor([program.ids([words[word] for word in row]) for row in rows.tolist()])


def _group(tokens: list[Tensor], index: Tensor, correct: Tensor, incorrect: Tensor) -> PromptGroup:
    clean, corrupted, means = tokens
    n, length = clean.shape
    return PromptGroup(
        template=0,
        clean=clean,
        corrupted=corrupted,
        correct=correct.clone(),
        incorrect=incorrect.clone(),
        positions={"END": torch.full((n,), length - 1)},
        texts=tuple(str(row) for row in clean.tolist()),
        corrupted_texts=tuple(str(row) for row in corrupted.tolist()),
        index=index,
        means=means,
    )


# ---------------------------------------------------------------------- what the weights connect


def wired_edges(model: TransformerBridge) -> set[str]:
    """Edges whose sender writes into a dimension that the receiver reads from.

    A query reads a dimension where the product of its weights with the key's is not zero, a value
    where that with the output's is not, and so on. The dump dimension does not count: it is read by
    nothing. An edge that is wired need not matter on any prompt.
    """
    layout = layout_of(model)
    return {
        edge.name
        for edge in layout.edges
        if (_written(model, edge.sender) & _read(model, layout, edge.receiver)).any()
    }


def _written(model: TransformerBridge, sender: Node) -> Tensor:
    if sender.layer is None:
        parts = [model.W_E, model.W_pos]
    elif sender.head is None:
        parts = [model.blocks[sender.layer].mlp.W_out]
    else:
        attention = model.blocks[sender.layer].attn
        parts = [attention.W_V[sender.head] @ attention.W_O[sender.head]]
    written = torch.stack([_nonzero(part.T) for part in parts]).any(0)
    written[-1] = False
    return written


def _read(model: TransformerBridge, layout: Layout, receiver: Receiver) -> Tensor:
    if receiver.layer is None:
        return _nonzero(model.W_U)
    block, head = model.blocks[receiver.layer], receiver.head
    if receiver.kind == "mlp":
        return _nonzero(block.mlp.W_in)
    query, key, value, out = (
        weight[head] for weight in (block.attn.W_Q, block.attn.W_K, block.attn.W_V, block.attn.W_O)
    )
    products = {"q": query @ key.T, "k": key @ query.T, "v": value @ out}
    return _nonzero(products[receiver.kind])


def _nonzero(rows: Float[Tensor, "row _"]) -> Tensor:
    return rows.detach().abs().amax(1) > 1e-6
