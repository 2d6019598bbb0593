"""Recordings made up of random numbers, and small networks taken apart and put together again."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from random_models import random_gpt2, random_prompts
from transformers import GPT2LMHeadModel, PreTrainedModel

from circuitkd.circuits.activations import Components, record_components
from circuitkd.circuits.influence import node_influence
from circuitkd.circuits.influence_result import Influence
from circuitkd.compare.comparison import Comparison, compare_recorded
from circuitkd.models import load_model
from circuitkd.nodes import component_nodes

CONFIG = {
    "seed": 0,
    "draws": 20,
    "null_draws": 0,
    "measure": "default",
    "preset": "default",
    "positions": "all",
    "task": "random",
}


def random_components(
    *,
    layers: int = 2,
    heads: int = 3,
    d_head: int = 4,
    d_model: int = 6,
    batches: Sequence[int] = (5, 4),
    positions: Sequence[int] = (3, 2),
    seed: int = 0,
) -> Components:
    """Independent random outputs and attention patterns; prompts are shuffled over the groups."""
    generator = torch.Generator().manual_seed(seed)
    nodes = component_nodes(layers, heads)
    order = torch.randperm(sum(batches), generator=torch.Generator().manual_seed(7))
    groups = order.split(list(batches))
    row_prompt = torch.cat([g.repeat_interleave(t) for g, t in zip(groups, positions, strict=True)])

    def rows(width: int) -> torch.Tensor:
        return torch.randn(len(row_prompt), width, generator=generator)

    patterns = [
        torch.randn(len(g), layers * heads, t, t, generator=generator).mul(2).softmax(-1)
        for g, t in zip(groups, positions, strict=True)
    ]
    return Components(
        nodes=nodes,
        features=tuple(rows(d_head if node.kind == "head" else d_model) for node in nodes),
        raw_mlp=tuple(rows(d_model) for _ in range(layers)),
        row_prompt=row_prompt,
        patterns=tuple(patterns),
        group_prompts=groups,
    )


def head_places(components: Components) -> list[int]:
    """Where the heads are among the nodes; patterns hold them in this order."""
    return [place for place, node in enumerate(components.nodes) if node.kind == "head"]


def copy_head(components: Components, source: int, target: int) -> Components:
    """The head with number ``target`` becomes a copy of ``source`` at half strength."""
    places = head_places(components)
    features = list(components.features)
    features[places[target]] = features[places[source]] / 2
    patterns = [group.clone() for group in components.patterns]
    for group in patterns:
        group[:, target] = group[:, source]
    return replace(components, features=tuple(features), patterns=tuple(patterns))


def influence_of(components: Components, effects: torch.Tensor, model: str = "m") -> Influence:
    return Influence(
        model=model,
        task="random",
        variant=None,
        bos=None,
        ablation="mean",
        metric="logit_difference",
        nodes=components.nodes,
        effects=effects,
        clean=torch.full((len(effects),), 2.0),
    )


def compare_networks(
    teacher: PreTrainedModel, student: PreTrainedModel, *, draws: int = 20
) -> Comparison:
    """Two networks in memory on random prompts of two lengths."""
    prompts = random_prompts(lengths=(7, 5), batches=(9, 7))
    places = [torch.arange(group.clean.shape[1]).expand_as(group.clean) for group in prompts.groups]
    models = load_model(teacher), load_model(student)
    influences = [node_influence(model, prompts) for model in models]
    left, right = (record_components(model, prompts, places) for model in models)
    sides = {"teacher": influences[0], "student": influences[1]}
    return compare_recorded(sides, (left, right), {**CONFIG, "draws": draws})


def permuted_heads(model: GPT2LMHeadModel, layer: int, order: Sequence[int]) -> GPT2LMHeadModel:
    """The same function with a layer's heads in another order: new head k is old ``order[k]``."""
    model = copy.deepcopy(model)
    qkv, out = head_weights(model, layer)
    old_qkv, old_out = qkv.clone(), out.clone()
    qkv.copy_(old_qkv[:, :, list(order)])
    out.copy_(old_out[list(order)])
    return model


def with_split_head(model: GPT2LMHeadModel, layer: int, head: int, into: int) -> GPT2LMHeadModel:
    """The same function, if ``into`` writes nothing: both heads do what one did, half each."""
    model = copy.deepcopy(model)
    qkv, out = head_weights(model, layer)
    qkv[:, :, into] = qkv[:, :, head]
    out[head] /= 2
    out[into] = out[head]
    return model


def without_head(model: GPT2LMHeadModel, layer: int, head: int) -> GPT2LMHeadModel:
    """The head writes nothing."""
    model = copy.deepcopy(model)
    head_weights(model, layer)[1][head] = 0
    return model


def gpt2_of_heads(**sizes: int) -> GPT2LMHeadModel:
    """A random GPT-2 without query, key and value biases, so that a head is its weights."""
    model = random_gpt2(**sizes)
    for name, parameter in model.named_parameters():
        if name.endswith("c_attn.bias"):
            parameter.data.zero_()
    return model


def head_weights(model: GPT2LMHeadModel, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's weights: [d_model, q k v, head, d_head], and [head, d_head, d_model]."""
    prefix = f"transformer.h.{layer}.attn"
    heads, width = model.config.n_head, model.config.n_embd
    qkv = model.get_parameter(f"{prefix}.c_attn.weight").data.view(width, 3, heads, width // heads)
    return qkv, model.get_parameter(f"{prefix}.c_proj.weight").data.view(
        heads, width // heads, width
    )
