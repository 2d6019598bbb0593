"""What heads move: names to the end (name movers), and away from the repeated name (S-inhibition).

A role of this kind has two parts, both in [0, 1] for each prompt: where the head looks, and what
becomes of what it finds there. The score is their product. The baseline is the score of a head
that looks everywhere alike and whose second part is perfect.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._attention import LayerAttention
from circuitkd.circuits._attention_words import direct_logits
from circuitkd.circuits._senders import Trace, even_slices, prompt_slices, trace
from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

_LEAST_ATTENTION = 1e-30


@dataclass(frozen=True)
class Copying:
    """Whether a head that looks at IO alone would raise, or lower, the answer most of all names."""

    up: Bool[Tensor, "batch head"]
    down: Bool[Tensor, "batch head"]


@torch.no_grad()
def group_copying(
    model: TransformerBridge, prompts: Prompts, group: PromptGroup, batch_size: int | None = None
) -> Copying:
    """The second part of name movers and negative name movers, for all heads of a group's prompts.

    The head's value at IO, minus its mean there over other names, goes through W_O and, the final
    norm taken as linear, to the logits of all answers of the prompts. ``up``: the right answer's
    logit is the highest of all; ``down``: the lowest. (Wang et al. 2022 ask for the top five of the
    vocabulary; among the task's own words one can ask for the first.)
    """
    names = torch.unique(torch.cat([t for g in prompts.groups for t in (g.correct, g.incorrect)]))
    answer = torch.searchsorted(names, group.correct.contiguous())
    replay = Replay(model, group.clean, group.answer)
    rows = rows_per_batch(model, group.clean.shape[1], batch_size)
    pre, means = replay.embed(group.clean), replay.embed(group.means)
    up, down = [], []
    for layer in range(replay.n_layers):
        attention = LayerAttention(replay, layer, pre[:1])
        change = _value_change(attention, pre, means, group.positions["IO"].to(pre.device))
        logits = direct_logits(model, replay.head_writes(layer, change), names).float().cpu()
        up.append(_is_highest(logits, answer))
        down.append(_is_highest(-logits, answer))
        pre, means = (_after_block(replay, layer, stream, rows) for stream in (pre, means))
    return Copying(torch.cat(up, 1), torch.cat(down, 1))


def _after_block(
    replay: Replay, layer: int, stream: Float[Tensor, "batch pos d_model"], rows: int
) -> Float[Tensor, "batch pos d_model"]:
    slices = even_slices(len(stream), rows)
    return torch.cat([replay.block(layer, stream[prompts]) for prompts in slices])


def _value_change(
    attention: LayerAttention,
    pre: Float[Tensor, "batch pos d_model"],
    means: Float[Tensor, "mean pos d_model"],
    places: Int[Tensor, "batch"],
) -> Float[Tensor, "batch head d_head"]:
    """The heads' values at one position of each prompt, minus their mean over ``means``."""
    own = pre[torch.arange(len(pre)), places][:, None]
    value = attention.for_query_heads(attention.project_all("v", attention.normed(own)))[:, :, 0]
    usual = attention.project_all("v", attention.normed(means)).mean(0)
    usual = attention.for_query_heads(usual)
    return value - rearrange(usual[:, places], "head b d -> b head d")


def _is_highest(
    logits: Float[Tensor, "batch head name"], answer: Int[Tensor, "batch"]
) -> Bool[Tensor, "batch head"]:
    """Whether the answer's logit is above that of every other name; ties do not count."""
    place = answer[:, None, None].expand(-1, logits.shape[1], 1)
    own = logits.gather(2, place)[..., 0]
    others = logits.scatter(2, place, -torch.inf).amax(-1)
    return own > others


@torch.no_grad()
def group_inhibition(
    model: TransformerBridge,
    group: PromptGroup,
    movers: Mapping[Node, float],
    batch_size: int | None = None,
) -> Float[Tensor, "batch head"]:
    """The second part of S-inhibition: the share of a mover's odds that it owes to a head.

    A mover's odds are its attention from END to IO over that to S1 and S2. The head's write at END
    is replaced by its mean over other names in what the mover's query reads, and nowhere else:
    path patching along the direct edge (Wang et al. 2022). With the odds then patched,
    ``effect = max(0, 1 - patched / clean)``, averaged over the movers by their weights; movers that
    do not come after the head count as 0.
    """
    replay = Replay(model, group.clean, group.answer)
    n_pos = group.clean.shape[1]
    rows = rows_per_batch(model, n_pos, batch_size)
    usual = [seen.z[:, replay.answer].mean(0) for seen in trace(replay, group.means, rows).layers]
    total = sum(movers.values())
    parts = []
    for prompts in prompt_slices(replay, len(group), n_pos, rows):
        run = trace(replay, group.clean[prompts], rows)
        changes = [
            replay.head_writes(layer, z - seen.z[:, replay.answer])
            for layer, (z, seen) in enumerate(zip(usual, run.layers, strict=True))
        ]
        effect = torch.zeros(len(run.embed), replay.n_layers, model.cfg.n_heads)
        for mover, weight in movers.items():
            if mover.layer:
                before = torch.cat(changes[: mover.layer], 1)
                lost = _lost_odds(replay, run, mover, before, group, prompts)
                effect[:, : mover.layer] += weight / total * lost.unflatten(1, (mover.layer, -1))
        parts.append(effect.flatten(1))
    return torch.cat(parts)


def _lost_odds(
    replay: Replay,
    run: Trace,
    mover: Node,
    changes: Float[Tensor, "batch sender d_model"],
    group: PromptGroup,
    prompts: slice,
) -> Float[Tensor, "batch sender"]:
    layer, head = mover.layer or 0, mover.head or 0
    pre = run.entering(layer)
    attention = LayerAttention(replay, layer, pre[:1])
    keys = attention.for_query_heads(attention.project_all("k", attention.normed(pre)))
    end = pre[:, None, replay.answer_slice]
    stream = torch.cat([end, end + changes[:, :, None]], 1)  # the clean one, then all patched ones
    query = attention.project("q", head, attention.normed(stream))
    pattern = attention.pattern(query, keys[:, head, None])[:, :, 0].cpu()
    odds = _log_odds(pattern, group, prompts)
    return (1 - (odds[:, 1:] - odds[:, :1]).exp()).clamp(0, 1)


def _log_odds(
    pattern: Float[Tensor, "batch stream key"], group: PromptGroup, prompts: slice
) -> Float[Tensor, "batch stream"]:
    rows = torch.arange(len(pattern))
    to = {label: pattern[rows, :, group.positions[label][prompts]] for label in ("IO", "S1", "S2")}
    wrong = (to["S1"] + to["S2"]).clamp_min(_LEAST_ATTENTION)
    return to["IO"].clamp_min(_LEAST_ATTENTION).log() - wrong.log()
