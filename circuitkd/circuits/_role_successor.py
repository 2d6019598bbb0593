"""Successor heads (Gould et al. 2023): from a member of a sequence to the one that follows."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._attention_words import ov_circuit
from circuitkd.prompts import PromptGroup, Prompts


@torch.no_grad()
def successor_scores(
    model: TransformerBridge, prompts: Prompts, members: tuple[str, ...]
) -> tuple[Float[Tensor, "prompt head"], float]:
    """Share of a prompt's steps that a head makes by its OV circuit alone.

    A step leads from a member (the token at ``N1``, ``N2``, ...) to the next one, the last to the
    right answer. It is made if of all members in the prompts the next one's logit is raised most
    when the head attends to the member alone. The head reads the embedding with what MLP 0 makes of
    it (in layer 0 the embedding alone), as in Gould et al., who ask the same of all ordinal words.
    No attention is involved: the baseline is that of a guess, one in the number of members.
    """
    steps = {id(group): _steps(group, members) for group in prompts.groups}
    pairs = torch.cat([each.flatten(0, 1) for each in steps.values()])
    words = torch.unique(pairs)
    made = torch.cat(
        [
            _makes(ov_circuit(model, layer, None, words, after_mlp0=layer > 0))
            for layer in range(model.cfg.n_layers)
        ]
    )
    scores = torch.zeros(len(prompts), len(made))
    for group in prompts.groups:
        source, target = torch.searchsorted(words, steps[id(group)]).unbind(-1)
        scores[group.index] = made[:, source, target].float().mean(-1).T
    return scores, 1 / len(words)


def _steps(group: PromptGroup, members: tuple[str, ...]) -> Int[Tensor, "batch step 2"]:
    rows = torch.arange(len(group))
    tokens = [group.clean[rows, group.positions[label]] for label in members]
    return torch.stack([torch.stack(tokens, 1), torch.stack([*tokens[1:], group.correct], 1)], -1)


def _makes(scores: Float[Tensor, "head source word"]) -> Bool[Tensor, "head source word"]:
    """Where a word is the only highest one."""
    highest = scores.amax(-1, keepdim=True)
    return (scores == highest) & ((scores == highest).sum(-1, keepdim=True) == 1)
