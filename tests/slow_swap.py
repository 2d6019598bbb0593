"""A swap the slow way: hooks, and a map between whole residual streams padded to one width."""

import numpy as np
import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.metrics import logit_difference
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts, compared_positions

Pair = tuple[Prompts, Prompts]


def writes(model: TransformerBridge, node: Node, tokens: Tensor) -> Tensor:
    """What a node adds to the residual stream [batch, pos, d_model]."""
    name = f"blocks.{node.layer}.{'attn.hook_z' if node.kind == 'head' else 'mlp.hook_out'}"
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=[name])
    value = next(iter(cache.values()))
    if node.head is None:
        return value
    d = model.cfg.d_head
    W_O = model.blocks[node.layer].attn.W_O[node.head].detach()
    return value.flatten(2)[..., node.head * d : (node.head + 1) * d] @ W_O


def centred_rows(model: TransformerBridge, node: Node, prompts: Prompts, places) -> list[Tensor]:
    """For each group: the node's centred writes at the compared positions [batch, compared, d]."""
    rows = []
    for group, at in zip(prompts.groups, places, strict=True):
        centred = writes(model, node, group.clean) - writes(model, node, group.means).mean(0)
        rows.append(centred.take_along_dim(at[..., None], dim=1))
    return rows


def slow_swap(
    teacher: TransformerBridge, student: TransformerBridge, pair: Pair, ours: Node, theirs: Node
) -> tuple[Tensor, Tensor]:
    """The metric of the second half of the prompts: ablated, and swapped."""
    n = len(pair[0])
    fit, held = ([side.take(part) for side in pair] for part in (range(n // 2), range(n // 2, n)))
    places = [
        [compared_positions(*groups) for groups in zip(*(s.groups for s in both), strict=True)]
        for both in (fit, held)
    ]
    x, y, new = (
        centred_rows(model, node, both[side], [at[side] for at in there])
        for model, node, both, side, there in (
            (student, theirs, fit, 1, places[0]),
            (teacher, ours, fit, 0, places[0]),
            (student, theirs, held, 1, places[1]),
        )
    )
    width = max(teacher.cfg.d_model, student.cfg.d_model)
    source, target = (np.vstack([padded(part, width) for part in rows]) for rows in (x, y))
    R, total = orthogonal_procrustes(source, target)
    R = R[:, : teacher.cfg.d_model]
    scale = total / np.square(source @ R).sum()
    ablated, swapped = torch.zeros(len(held[0])), torch.zeros(len(held[0]))
    for group, rows, (at, _) in zip(held[0].groups, new, places[1], strict=True):
        mapped = torch.tensor(scale * padded(rows, width) @ R).float().unflatten(0, rows.shape[:2])
        old = writes(teacher, ours, group.clean)
        mean = writes(teacher, ours, group.means).mean(0, keepdim=True).expand_as(old)
        value = mean.clone()
        value.scatter_add_(1, at[..., None].expand_as(mapped), mapped)
        for values, written in ((ablated, mean), (swapped, value)):
            values[group.index] = hooked_metric(teacher, group, ours, written - old)
    return ablated, swapped


def padded(rows: Tensor, width: int) -> np.ndarray:
    flat = rows.flatten(0, 1).double().numpy()
    return np.pad(flat, ((0, 0), (0, width - flat.shape[1])))


def hooked_metric(
    model: TransformerBridge, group: PromptGroup, node: Node, change: Tensor
) -> Tensor:
    part = "attn.hook_out" if node.kind == "head" else "mlp.hook_out"

    def add(value, hook):
        return value + change

    with torch.no_grad(), model.hooks(fwd_hooks=[(f"blocks.{node.layer}.{part}", add)]):
        logits = model(group.clean)[:, -1]
    return logit_difference(logits, group.correct, group.incorrect)
