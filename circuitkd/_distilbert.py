"""DistilBERT for TransformerLens, which has no adapter for it (4.3)."""

from typing import Any

from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    PosEmbedBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.supported_architectures.bert import BertArchitectureAdapter

ARCHITECTURE = "DistilBertForMaskedLM"


class DistilBertArchitectureAdapter(BertArchitectureAdapter):
    """``DistilBertForMaskedLM``: BERT's layer without segments, under names of its own."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        attention = {"q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin"}
        mlp = {"in": "lin1", "out": "lin2"}
        self.component_mapping = {
            "embed": EmbeddingBridge(name="distilbert.embeddings.word_embeddings"),
            "pos_embed": PosEmbedBridge(name="distilbert.embeddings.position_embeddings"),
            "embed_ln": self._norm("distilbert.embeddings.LayerNorm"),
            "blocks": BlockBridge(
                name="distilbert.transformer.layer",
                submodules={
                    "ln1": self._norm("sa_layer_norm"),
                    "ln2": self._norm("output_layer_norm"),
                    "attn": AttentionBridge(
                        name="attention", config=self.cfg, submodules=_linear(attention)
                    ),
                    "mlp": MLPBridge(name="ffn", config=self.cfg, submodules=_linear(mlp)),
                },
            ),
            "mlm_head": LinearBridge(name="vocab_transform"),
            "unembed": UnembeddingBridge(name="vocab_projector"),
            "ln_final": self._norm("vocab_layer_norm"),
        }

    def prepare_model(self, hf_model: Any) -> None:
        """Nothing: there is no pooler and one head only."""

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)


def _linear(names: dict[str, str]) -> dict[str, Any]:
    return {part: LinearBridge(name=name) for part, name in names.items()}


def register() -> None:
    """Let TransformerLens know the adapter, unless it has one by now."""
    if ARCHITECTURE not in SUPPORTED_ARCHITECTURES:
        ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, DistilBertArchitectureAdapter)
