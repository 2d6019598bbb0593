"""One tiny random network of every supported architecture, from its Hugging Face configuration."""

from collections.abc import Callable
from typing import Any

import torch
from random_models import VOCABULARY, random_gpt2, random_llama
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

WINDOW = 4  # of local attention: shorter than the prompts of the tests
LAYERS = 2

_SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ONE_KEY = {**_SIZES, "num_key_value_heads": 1}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _gpt_neo() -> PreTrainedModel:
    config = GPTNeoConfig(
        num_layers=LAYERS,
        attention_types=[[["global", "local"], LAYERS // 2]],
        num_heads=4,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        window_size=WINDOW,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPTNeoForCausalLM(config)


def _gemma_2() -> PreTrainedModel:
    """With soft caps that bite: scores and logits of these sizes occur."""
    capped: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    sizes: dict[str, Any] = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
    return Gemma2ForCausalLM(Gemma2Config(**_GROUPED, **capped, **sizes))


def _opt() -> PreTrainedModel:
    """Smooth, as those published are not: finite differences do not work on the kinks of a ReLU."""
    config = OPTConfig(**_SIZES, ffn_dim=64, word_embed_proj_dim=32, activation_function="gelu")
    return OPTForCausalLM(config)


def _distilbert() -> PreTrainedModel:
    config = DistilBertConfig(
        n_layers=LAYERS,
        n_heads=4,
        dim=32,
        hidden_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    return DistilBertForMaskedLM(config)


_NETWORKS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: random_gpt2(layers=LAYERS),
    "gpt-neo": _gpt_neo,
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES)),
    "gpt-neox-sequential": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**_SIZES, use_parallel_residual=False)
    ),
    "llama": lambda: random_llama(layers=LAYERS),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=WINDOW)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=16)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_GROUPED, **_EXPERTS)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_ONE_KEY, head_dim=16)),
    "gemma-2": _gemma_2,
    "opt": _opt,
    "phi": lambda: PhiForCausalLM(PhiConfig(**_SIZES)),
    "phi-3": lambda: Phi3ForCausalLM(Phi3Config(**_GROUPED)),
    "bert": lambda: BertForMaskedLM(BertConfig(**_SIZES)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**_SIZES)),
    "distilbert": _distilbert,
}
NAMES = tuple(_NETWORKS)


def network(name: str, seed: int = 0) -> PreTrainedModel:
    """Random weights and biases of order 0.15: attention is not flat, and biases are not zero."""
    made = _NETWORKS[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise + (1 if parameter.ndim == 1 else 0) * parameter)
    made.set_attn_implementation("eager")
    return made.eval()
