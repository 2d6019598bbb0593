"""Where two models can be compared: positions at which they read the same text."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.models import tokenizer_of
from circuitkd.prompts import PromptGroup, Prompts

Positions = list[Int[Tensor, "batch compared"]]


def compared_positions(
    models: Sequence[TransformerBridge], pair: tuple[Prompts, Prompts]
) -> tuple[Positions, Positions, bool]:
    """Positions to compare, group by group, in the teacher's and in the student's tokens.

    All positions if both models read the same tokens in every prompt; the labelled positions
    otherwise. The last value says whether it is all of them.
    """
    if all(
        _token_texts(models[0], left) == _token_texts(models[1], right)
        for left, right in zip(pair[0].groups, pair[1].groups, strict=True)
    ):
        everywhere = [_everywhere(group) for group in pair[0].groups]
        return everywhere, everywhere, True
    labelled = [
        _labelled(left, right) for left, right in zip(pair[0].groups, pair[1].groups, strict=True)
    ]
    return [left for left, _ in labelled], [right for _, right in labelled], False


def _token_texts(model: TransformerBridge, group: PromptGroup) -> list[list[str]]:
    tokenizer = tokenizer_of(model)
    return [[str(tokenizer.convert_ids_to_tokens(i)) for i in ids] for ids in group.clean.tolist()]


def _everywhere(group: PromptGroup) -> Int[Tensor, "batch compared"]:
    batch, length = group.clean.shape
    return torch.arange(length).expand(batch, length)


def _labelled(left: PromptGroup, right: PromptGroup) -> tuple[Tensor, Tensor]:
    """Both models' labelled positions, in text order; places that coincide are taken once."""
    labels = [label for label in left.positions if label in right.positions]
    labels.sort(key=lambda label: int(left.positions[label][0]))
    kept: list[str] = []
    for label in labels:
        if not any(torch.equal(left.positions[label], left.positions[other]) for other in kept):
            kept.append(label)
    return (
        torch.stack([left.positions[label] for label in kept], dim=1),
        torch.stack([right.positions[label] for label in kept], dim=1),
    )
