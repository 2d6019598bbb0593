"""Ablating many nodes at once, the slow way: a fresh forward pass with a hook on each of them."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.metrics import logit_difference
from circuitkd.models import component_nodes_of
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts


def slow_metric(
    model: TransformerBridge, prompts: Prompts, kept: Collection[Node], ablation: str
) -> Tensor:
    """The logit difference of each prompt, in sampling order, with all but ``kept`` ablated."""
    values = torch.zeros(len(prompts))
    for group in prompts.groups:
        gone = [node for node in component_nodes_of(model) if node not in kept]
        hooks = [_ablating(model, group, node, ablation) for node in gone]
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            logits = model(group.clean)[:, group.answer]
        values[group.index] = logit_difference(logits, group.correct, group.incorrect)
    return values


def _ablating(
    model: TransformerBridge, group: PromptGroup, node: Node, ablation: str
) -> tuple[str, Callable[..., Tensor]]:
    name = f"blocks.{node.layer}.{'attn.hook_z' if node.kind == 'head' else 'mlp.hook_out'}"
    other = group.corrupted if ablation == "resample" else group.means
    with torch.no_grad():
        _, cache = model.run_with_cache(other, names_filter=[name])
    value = next(iter(cache.values()))
    value = {"zero": 0 * value[:1], "mean": value.mean(0, keepdim=True)}.get(ablation, value)

    def edit(output: Tensor, hook: object) -> Tensor:
        output = output.clone()
        if node.head is None:
            output[:] = value
        elif output.ndim == 4:
            output[:, :, node.head] = value[:, :, node.head]
        else:
            width = model.cfg.d_head
            at = slice(node.head * width, (node.head + 1) * width)
            output[..., at] = value[..., at]
        return output

    return name, edit
