"""Tiny random models and random prompts, made in milliseconds."""

from typing import TypeVar

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from circuitkd import load_model
from circuitkd.prompts import PromptGroup, Prompts

VOCABULARY = 60
Model = TypeVar("Model", bound=PreTrainedModel)


def random_gpt2(
    *, layers: int = 3, heads: int = 4, width: int = 32, vocabulary: int = VOCABULARY, seed: int = 0
) -> GPT2LMHeadModel:
    """A GPT-2 whose weights are large enough that every part matters."""
    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=vocabulary,
        n_positions=64,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    return _enlarged(GPT2LMHeadModel(config), seed)


def random_llama(
    *,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 32,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A Llama with grouped-query attention."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=width,
        intermediate_size=2 * width,
        vocab_size=vocabulary,
        max_position_embeddings=64,
    )
    return _enlarged(LlamaForCausalLM(config), seed)


def _enlarged(model: Model, seed: int) -> Model:
    """Random weights and biases of order 0.15: attention is not flat, and biases are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise + (parameter if parameter.ndim == 1 else 0))
    return model.eval()


FAMILIES = {"gpt2": random_gpt2, "llama": random_llama}


def random_bridge(family: str, **sizes: int) -> TransformerBridge:
    return load_model(FAMILIES[family](**sizes))


def random_prompts(
    lengths: tuple[int, ...] = (7, 5),
    batches: tuple[int, ...] = (5, 3),
    *,
    seed: int = 0,
    means: int = 64,
    bos: bool = False,
    metric: str = "logit_difference",
    answer: int = -1,
) -> Prompts:
    """Groups of random tokens; sampling order is shuffled over the groups."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(rows: int, length: int) -> torch.Tensor:
        drawn = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
        if bos and length > 1:
            drawn[:, 0] = 0
        return drawn

    order = torch.randperm(sum(batches), generator=generator).split(list(batches))
    groups = tuple(
        PromptGroup(
            template=number,
            clean=tokens(batch, length),
            corrupted=tokens(batch, length),
            correct=tokens(batch, 1)[:, 0],
            incorrect=tokens(batch, 1)[:, 0],
            positions={"END": torch.full((batch,), answer % length)},
            texts=("",) * batch,
            corrupted_texts=("",) * batch,
            index=order[number],
            means=tokens(means, length),
            candidates=torch.arange(10, 30),
            valid=torch.rand(batch, 20, generator=generator) > 0.5,
            answer=answer,
        )
        for number, (length, batch) in enumerate(zip(lengths, batches, strict=True))
    )
    return Prompts(
        task="random",
        variant=None,
        metric=metric,
        bos="<bos>" if bos else None,
        seed=seed,
        groups=groups,
        source=None,
    )
