"""Roles that are about any tokens, measured on random tokens said twice.

The two halves of a probe are equal and hold no token twice, so for every token of the second half
exactly one earlier token is the same. Half lengths vary between probes, so that a head which looks
a fixed number of tokens back does not pass for one that looks for a token.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._head_patterns import cell_attention, layer_patterns, uniform_attention
from circuitkd.circuits._role_result import DUPLICATE, INDUCTION, PREVIOUS
from circuitkd.prompts import Prompts

_LONGEST, _SHORTEST = 20, 3
_LENGTHS = (1.0, 0.8, 0.6)

Scores = tuple[Float[Tensor, "sample head"], float]
Cells = Int[Tensor, "cell 2"]


def previous_token_cells(begin: int, half: int) -> Cells:
    """Each token to the one before it (Elhage et al. 2021; Wang et al. 2022).

    ``begin`` is the position of the first random token; a BOS before it is nobody's previous token.
    """
    queries = torch.arange(begin + 1, begin + 2 * half)
    return torch.stack([queries, queries - 1], 1)


def duplicate_token_cells(begin: int, half: int) -> Cells:
    """Each repeated token to its earlier occurrence (Wang et al. 2022)."""
    queries = torch.arange(begin + half, begin + 2 * half)
    return torch.stack([queries, queries - half], 1)


def induction_cells(begin: int, half: int) -> Cells:
    """Each repeated token to the one that followed it before: the prefix-matching score of
    Olsson et al. 2022. Copying, the other half of their definition, is not asked for.
    """
    queries = torch.arange(begin + half, begin + 2 * half)
    return torch.stack([queries, queries - half + 1], 1)


CELLS: Mapping[str, Callable[[int, int], Cells]] = {
    PREVIOUS: previous_token_cells,
    DUPLICATE: duplicate_token_cells,
    INDUCTION: induction_cells,
}


def repeated_sequences(
    model: TransformerBridge, prompts: Prompts, n: int, seed: int
) -> list[tuple[int, Int[Tensor, "_ _"]]]:
    """Half lengths, each with its probes; a BOS stands first if the prompts have one.

    Empty where the model knows too few tokens, or reads too few at once, for halves of three.
    """
    first = int(prompts.groups[0].clean[0, 0]) if prompts.bos else None
    allowed = _ordinary_tokens(model, first)
    prefix = [] if first is None else [first]
    longest = min(_LONGEST, (int(model.cfg.n_ctx) - len(prefix)) // 2, len(allowed))
    halves = sorted({max(_SHORTEST, round(longest * part)) for part in _LENGTHS})
    if longest < _SHORTEST:
        return []
    rng = np.random.default_rng(seed)
    found = []
    for number, half in enumerate(halves):
        count = len(range(number, n, len(halves)))
        rows = [rng.choice(allowed, half, replace=False).tolist() for _ in range(count)]
        if rows:
            found.append((half, torch.tensor([[*prefix, *row, *row] for row in rows])))
    return found


def probe_scores(
    model: TransformerBridge,
    sequences: list[tuple[int, Int[Tensor, "_ _"]]],
    batch_size: int | None = None,
) -> dict[str, Scores]:
    """Scores of the three roles, one row a probe, and the score of a uniform head."""
    scores: dict[str, list[Tensor]] = {role: [] for role in CELLS}
    even: dict[str, list[Tensor]] = {role: [] for role in CELLS}
    for half, tokens in sequences:
        begin = tokens.shape[1] - 2 * half
        cells = {r: c(begin, half).expand(len(tokens), -1, 2) for r, c in CELLS.items()}
        layers: dict[str, list[Tensor]] = {role: [] for role in CELLS}
        for pattern in layer_patterns(model, tokens, batch_size):
            for role, where in cells.items():
                layers[role].append(cell_attention(pattern, where))
        for role, where in cells.items():
            scores[role].append(torch.cat(layers[role], 1))
            even[role].append(uniform_attention(where))
    return {r: (torch.cat(scores[r]), float(torch.cat(even[r]).double().mean())) for r in CELLS}


def _ordinary_tokens(model: TransformerBridge, bos: int | None) -> list[int]:
    special, known = {bos}, int(model.cfg.d_vocab)
    if model.tokenizer is not None:
        special |= set(model.tokenizer.all_special_ids)
        known = min(known, len(model.tokenizer))
    return [token for token in range(known) if token not in special]
