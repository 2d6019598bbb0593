"""The supported architectures: the one place that knows how they differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor
from transformers.activations import gelu

Norms = Literal["before", "both", "after"]
"""Where a block's layer norms stand.

``before``: attention and MLP read a normalised stream and add to it,
``mid = pre + attention(norm(pre))``. ``both``: what they write is normalised, too,
``mid = pre + norm(attention(norm(pre)))``. ``after``: the sum is normalised,
``mid = norm(pre + attention(pre))``.
"""

Part = Callable[[Any, Tensor], Tensor]


def _mlp(block: Any, read: Float[Tensor, "batch pos d_model"]) -> Tensor:
    return first_output(block.mlp(block.ln2(read)))


def _mlp_behind_shared_norm(block: Any, read: Float[Tensor, "batch pos d_model"]) -> Tensor:
    return first_output(block.mlp(block.ln1(read)))


def _mlp_behind_no_norm(block: Any, read: Float[Tensor, "batch pos d_model"]) -> Tensor:
    return first_output(block.mlp(read))


def _opt_mlp(block: Any, read: Float[Tensor, "batch pos d_model"]) -> Tensor:
    layer = block.original_component  # the two matrices are the layer's own, not a module's
    normed = block.ln2.original_component(read)
    return layer.fc2(layer.activation_fn(layer.fc1(normed)))


def _bert_mlp(block: Any, read: Float[Tensor, "batch pos d_model"]) -> Tensor:
    layer = block.original_component
    return layer.output.dense(layer.intermediate(read))


def _final_norm(model: Any, end: Float[Tensor, "*batch d_model"]) -> Tensor:
    return model.ln_final(end)


def _bert_head(model: Any, end: Float[Tensor, "*batch d_model"]) -> Tensor:
    return model.original_model.cls.predictions.transform(end)


def _roberta_head(model: Any, end: Float[Tensor, "*batch d_model"]) -> Tensor:
    head = model.original_model.lm_head
    return head.layer_norm(gelu(head.dense(end)))


def _distilbert_head(model: Any, end: Float[Tensor, "*batch d_model"]) -> Tensor:
    network = model.original_model
    return network.vocab_layer_norm(network.activation(network.vocab_transform(end)))


@dataclass(frozen=True)
class Family:
    """What the engine must know about one family of architectures.

    Attributes:
        name: for people.
        architectures: the classes of Hugging Face.
        examples: models on the hub.
        norms: where the layer norms of a block stand.
        masked: an encoder that fills in a mask; else the answer follows the last token.
        shared_norm: the MLP reads the very tensor, behind the first norm, that attention reads.
        flat_mlp: inside the MLP the network lines up the tokens of all prompts.
        attention_scale: what query · key is multiplied with; ``None``: as the network says, or
            1 / √d_head.
        mlp: (block, residual stream) -> what the MLP writes.
        head: (model, final residual stream) -> what the unembedding reads.
        end: the hook point of the final residual stream.
    """

    name: str
    architectures: tuple[str, ...]
    examples: tuple[str, ...]
    norms: Norms = "before"
    masked: bool = False
    shared_norm: bool = False
    flat_mlp: bool = False
    attention_scale: float | None = None
    mlp: Part = _mlp
    head: Part = _final_norm
    end: str = "ln_final.hook_in"

    @property
    def adds_up(self) -> bool:
        """A decoder whose stream is a sum, along which a head's write can be followed."""
        return not self.masked and self.norms == "before"

    @property
    def mlp_input(self) -> str:
        """The hook, inside a block, whose tensor the MLP's branch and nothing else reads."""
        return "mlp.hook_in" if self.shared_norm or self.norms == "after" else "ln2.hook_in"


def _encoder(name: str, architecture: str, example: str, mlp: Part, head: Part) -> Family:
    return Family(
        name,
        (architecture,),
        (example,),
        norms="after",
        masked=True,
        mlp=mlp,
        head=head,
        end="mlm_head.hook_in",
    )


FAMILIES: tuple[Family, ...] = (
    Family("GPT-2", ("GPT2LMHeadModel",), ("gpt2", "distilgpt2")),
    Family("GPT-Neo", ("GPTNeoForCausalLM",), ("EleutherAI/gpt-neo-125m",), attention_scale=1.0),
    Family("GPT-NeoX", ("GPTNeoXForCausalLM",), ("EleutherAI/pythia-160m",)),
    Family("Llama", ("LlamaForCausalLM",), ("HuggingFaceTB/SmolLM2-135M",)),
    Family("Mistral", ("MistralForCausalLM",), ("mistralai/Mistral-7B-v0.1",)),
    Family("Mixtral", ("MixtralForCausalLM",), ("mistralai/Mixtral-8x7B-v0.1",)),
    Family("Qwen2", ("Qwen2ForCausalLM",), ("Qwen/Qwen2.5-0.5B",)),
    Family("Qwen3", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), ("Qwen/Qwen3-0.6B",)),
    Family("Gemma", ("GemmaForCausalLM",), ("google/gemma-2b",)),
    Family("Gemma 2", ("Gemma2ForCausalLM",), ("google/gemma-2-2b",), norms="both"),
    Family("OPT", ("OPTForCausalLM",), ("facebook/opt-125m",), flat_mlp=True, mlp=_opt_mlp),
    Family(
        "Phi",
        ("PhiForCausalLM",),
        ("microsoft/phi-1_5",),
        shared_norm=True,
        mlp=_mlp_behind_shared_norm,
    ),
    Family("Phi-3", ("Phi3ForCausalLM",), ("microsoft/Phi-3-mini-4k-instruct",)),
    _encoder("BERT", "BertForMaskedLM", "bert-base-uncased", _bert_mlp, _bert_head),
    _encoder("RoBERTa", "RobertaForMaskedLM", "roberta-base", _bert_mlp, _roberta_head),
    _encoder(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "distilbert-base-uncased",
        _mlp_behind_no_norm,
        _distilbert_head,
    ),
)


def first_output(output: Any) -> Tensor:
    """The tensor of a module that may say more than its output."""
    return output[0] if isinstance(output, tuple) else output
