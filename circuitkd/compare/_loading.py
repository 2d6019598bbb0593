"""Models as the functions for two models take them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel

from circuitkd.models import load_model

ModelLike = str | Path | PreTrainedModel | TransformerBridge
Progress = Callable[[str, int, int], None]


def load_with_progress(
    model: ModelLike, progress: Progress | None, **options: Any
) -> TransformerBridge:
    """`load_model` with a sign of life, for what is read from a disk or a network."""
    if progress is None or not isinstance(model, str | Path):
        return load_model(model, **options)
    progress(f"Loading {model}", 0, 0)
    loaded = load_model(model, **options)
    progress(f"Loading {model}", 1, 1)
    return loaded
