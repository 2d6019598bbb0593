"""Gradient estimates are the derivatives they claim to be, and exact where effects are linear."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from circuits.slow_patching import receiver_hooks, run, sender_values
from circuits.test_patching import linear_bridge, model_of, some_edges
from random_models import random_bridge, random_gpt2, random_llama, random_prompts
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model
from circuitkd.circuits import _senders
from circuitkd.circuits._senders import even_slices
from circuitkd.circuits.attribution import (
    EdgeScores,
    NodeScores,
    edge_attribution,
    node_attribution,
)
from circuitkd.circuits.edges import edges_of, layout_of
from circuitkd.circuits.patching import path_patching
from circuitkd.errors import InputError
from circuitkd.metrics import logit_difference, probability_difference
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

STEP = 1e-2
MODELS = [("gpt2", 4), ("llama", 2), ("llama", 1)]


def group_metric(group: PromptGroup, metric: str) -> Callable[[Tensor], Tensor]:
    if metric == "logit_difference":
        return lambda logits: logit_difference(logits, group.correct, group.incorrect)
    assert group.candidates is not None
    assert group.valid is not None
    candidates, valid = group.candidates, group.valid
    return lambda logits: probability_difference(logits, candidates, valid)


def derivative(
    model: TransformerBridge,
    group: PromptGroup,
    metric: str,
    hooks: Callable[[float], dict[str, Callable]],
) -> Tensor:
    """d metric / d step at 0, by central differences."""
    value = group_metric(group, metric)
    up, down = (value(run(model, group.clean, hooks(step))) for step in (STEP, -STEP))
    return (up - down) / (2 * STEP)


# ---------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("ablation", ["corrupted", "mean", "zero"])
@pytest.mark.parametrize(("family", "kv_heads"), MODELS)
def test_eap_is_the_derivative_along_the_senders_change(
    family: str, kv_heads: int, ablation: str
) -> None:
    model, prompts = model_of(family, kv_heads), random_prompts((5,), (2,))
    (group,) = prompts.groups
    result = edge_attribution(model, prompts, method="eap", ablation=ablation)
    for edge in some_edges(model, 11):
        change = sender_values(model, group, edge.sender, ablation)
        change = change - sender_values(model, group, edge.sender, "clean")
        theirs = derivative(
            model,
            group,
            "logit_difference",
            lambda step, edge=edge, change=change: receiver_hooks(
                model, group, edge, step * change
            ),
        )
        ours = result.scores[group.index, result.edges.index(edge)]
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2, msg=edge.name)


@pytest.mark.parametrize("metric", ["logit_difference", "probability_difference"])
@pytest.mark.parametrize("ablation", ["corrupted", "mean", "zero"])
@pytest.mark.parametrize(("family", "kv_heads"), MODELS)
def test_attribution_patching_is_the_derivative_along_the_nodes_change(
    family: str, kv_heads: int, ablation: str, metric: str
) -> None:
    model, prompts = model_of(family, kv_heads, layers=2), random_prompts((5,), (2,), metric=metric)
    (group,) = prompts.groups
    result = node_attribution(model, prompts, ablation=ablation)
    for column, node in enumerate(result.nodes):
        change = sender_values(model, group, node, ablation)
        change = change - sender_values(model, group, node, "clean")
        point = f"blocks.{node.layer}." + (
            "mlp.hook_out" if node.kind == "mlp" else "attn.hook_out"
        )
        theirs = derivative(
            model,
            group,
            metric,
            lambda step, point=point, change=change: {point: lambda t, hook: t + step * change},
        )
        ours = result.scores[group.index, column]
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2, msg=node.name)


def test_the_scores_of_a_nodes_edges_sum_to_the_nodes_score() -> None:
    """The gradient at an output is the sum of the gradients at all inputs that read it."""
    model, prompts = model_of("llama", 2), random_prompts()
    nodes = node_attribution(model, prompts)
    edges = edge_attribution(model, prompts, method="eap")
    for column, node in enumerate(nodes.nodes):
        leaving = [number for number, edge in enumerate(edges.edges) if edge.sender == node]
        total = edges.scores[:, leaving].sum(1)
        torch.testing.assert_close(total, nodes.scores[:, column], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- where it is exact


@pytest.mark.parametrize("method", ["eap", "eap-ig"])
def test_estimates_are_exact_in_a_linear_network(method: str) -> None:
    model, prompts = linear_bridge(), random_prompts((5,), (4,))
    exact = path_patching(model, prompts).effects
    estimate = edge_attribution(model, prompts, method=method).scores
    scale = exact.abs().max()
    assert (estimate - exact).abs().max() < 0.02 * scale
    assert np.corrcoef(estimate.flatten(), exact.flatten())[0, 1] > 0.999


def input_total(result: EdgeScores) -> Tensor:
    """Sum of the scores of the edges that leave the input, prompt by prompt."""
    leaving = [number for number, edge in enumerate(result.edges) if edge.sender.kind == "input"]
    return result.scores[:, leaving].sum(1)


def total_effect(model: TransformerBridge, prompts: Prompts, ablation: str) -> Tensor:
    """metric with the embedding replaced - clean metric."""
    total = torch.zeros(len(prompts))
    for group in prompts.groups:
        value = group_metric(group, prompts.metric)
        embed = sender_values(model, group, Node("input"), ablation)
        moved = {"blocks.0.hook_in": lambda t, hook, embed=embed: embed.expand_as(t)}
        change = value(run(model, group.clean, moved)) - value(run(model, group.clean, {}))
        total[group.index] = change
    return total


@pytest.mark.parametrize(
    ("ablation", "metric"),
    [
        ("corrupted", "logit_difference"),
        ("mean", "logit_difference"),
        pytest.param("corrupted", "probability_difference", marks=pytest.mark.slow),
        ("mean", "probability_difference"),
    ],
)
@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [*MODELS[:2], *(pytest.param(*m, marks=pytest.mark.slow) for m in MODELS[2:])],
)
def test_the_edges_that_leave_the_input_sum_to_the_total_effect(
    family: str, kv_heads: int, ablation: str, metric: str
) -> None:
    model, prompts = model_of(family, kv_heads, layers=2), random_prompts(metric=metric)
    total = total_effect(model, prompts, ablation)
    errors = {
        steps: float((input_total(result) - total).abs().max() / total.abs().max())
        for steps in (1, 32)
        for result in [edge_attribution(model, prompts, steps=steps, ablation=ablation)]
    }
    assert errors[32] < 0.02
    assert errors[32] < errors[1] / 10


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
@pytest.mark.parametrize("method", ["eap", "eap-ig"])
def test_folding_the_layer_norms_changes_no_estimate(make, method: str) -> None:
    prompts = random_prompts()
    plain, folded = (
        edge_attribution(load_model(make(), processed=processed), prompts, method=method).scores
        for processed in (False, True)
    )
    assert plain.abs().max() > 0.1
    torch.testing.assert_close(plain, folded, atol=1e-4, rtol=0)


def test_one_step_is_taken_in_the_middle_of_the_path() -> None:
    """Interior midpoints: neither end is a point of the rule."""
    model, prompts = random_bridge("gpt2"), random_prompts((5,), (3,))
    (group,) = prompts.groups
    result = edge_attribution(model, prompts, steps=1)
    clean = sender_values(model, group, Node("input"), "clean")
    change = sender_values(model, group, Node("input"), "corrupted") - clean

    def moved(step: float) -> dict[str, Callable]:
        return {"blocks.0.hook_in": lambda t, hook: clean + (0.5 + step) * change}

    theirs = derivative(model, group, "logit_difference", moved)
    torch.testing.assert_close(input_total(result)[group.index], theirs, atol=1e-3, rtol=1e-2)


def test_integrated_gradients_are_closer_to_the_truth() -> None:
    model, prompts = random_bridge("llama"), random_prompts()
    exact = path_patching(model, prompts).effects
    error = {
        method: float((edge_attribution(model, prompts, method=method).scores - exact).norm())
        for method in ("eap", "eap-ig")
    }
    assert error["eap-ig"] < error["eap"]


# ---------------------------------------------------------------------- auto


def test_auto_verifies_the_strongest_edges_and_marks_them() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    result = edge_attribution(model, prompts, method="auto", top=12)
    estimate = edge_attribution(model, prompts, method="eap-ig").scores
    torch.testing.assert_close(result.scores, estimate, atol=1e-6, rtol=0)
    frame, exact = result.frame, result.exact
    assert frame["exact"].tolist() == exact.tolist()
    assert exact.sum() == 12
    estimates, scores = frame["estimate"].to_numpy(), frame["score"].to_numpy()
    assert np.abs(estimates[exact]).min() >= np.abs(estimates[~exact]).max()
    truth = path_patching(model, prompts).frame["effect"].to_numpy()
    assert np.allclose(scores[exact], truth[exact], atol=1e-5)
    assert np.array_equal(scores[~exact], estimates[~exact])
    ranks = [pd.Series(values[exact]).rank() for values in (estimates, truth)]
    assert result.rank_correlation == pytest.approx(ranks[0].corr(ranks[1]), abs=1e-6)
    assert "12 verified by path patching" in repr(result)


def test_without_verification_nothing_is_called_exact() -> None:
    result = edge_attribution(random_bridge("gpt2", layers=1), random_prompts((4,), (2,)))
    assert not result.frame["exact"].any()
    assert np.isnan(result.rank_correlation)


# ---------------------------------------------------------------------- border


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_batch_size_changes_nothing(batch_size: int) -> None:
    model, prompts = random_bridge("llama"), random_prompts(batches=(7, 1))
    torch.testing.assert_close(
        edge_attribution(model, prompts, batch_size=batch_size).scores,
        edge_attribution(model, prompts).scores,
        atol=1e-4,
        rtol=1e-4,
    )


def test_the_differences_held_at_once_stay_within_a_budget(monkeypatch) -> None:
    model, prompts = random_bridge("gpt2"), random_prompts((5,), (9,))
    whole = edge_attribution(model, prompts).scores
    each = len(layout_of(model).senders) * 5 * 32 * 4
    monkeypatch.setattr(_senders, "_CPU_BYTES", 2 * each)
    held: list[int] = []
    original = _senders.sender_changes

    def watched(replay, clean, other) -> Tensor:
        changes = original(replay, clean, other)
        held.append(changes.nbytes)
        return changes

    monkeypatch.setattr("circuitkd.circuits.attribution.sender_changes", watched)
    torch.testing.assert_close(edge_attribution(model, prompts).scores, whole, atol=1e-4, rtol=1e-4)
    assert len(held) == 5
    assert max(held) <= 2 * each


def test_slices_cover_everything_once() -> None:
    for n, most in ((7, 3), (6, 3), (1, 5), (5, 1)):
        parts = even_slices(n, most)
        assert [row for part in parts for row in range(n)[part]] == list(range(n))
        assert max(part.stop - part.start for part in parts) <= most


def test_corrupting_nothing_scores_nothing() -> None:
    prompts = random_prompts()
    groups = tuple(dataclasses.replace(g, corrupted=g.clean) for g in prompts.groups)
    same = dataclasses.replace(prompts, groups=groups)
    assert edge_attribution(random_bridge("gpt2"), same).scores.abs().max() == 0


def test_attribution_leaves_the_model_as_it_was() -> None:
    model, prompts = random_bridge("llama"), random_prompts()
    tokens = prompts.groups[0].clean
    before = model(tokens)
    edge_attribution(model, prompts)
    node_attribution(model, prompts)
    assert torch.equal(model(tokens), before)
    assert not any(point._forward_hooks for point in model.hook_dict.values())
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(weight.requires_grad for weight in model.parameters())


def test_scores_survive_saving(tmp_path) -> None:
    model, prompts = random_bridge("llama", layers=1), random_prompts(bos=True)
    for method in ("eap-ig", "auto"):
        result = edge_attribution(model, prompts, method=method, top=5)
        result.save(tmp_path / "scores.safetensors")
        loaded = EdgeScores.load(tmp_path / "scores.safetensors")
        assert torch.equal(loaded.scores, result.scores)
        assert loaded.frame.equals(result.frame)
        assert (loaded.method, loaded.steps, loaded.bos) == (method, 5, "<bos>")
        assert repr(loaded) == repr(result)


def test_eap_says_that_it_took_one_step() -> None:
    model, prompts = random_bridge("gpt2", layers=1), random_prompts((4,), (2,))
    assert edge_attribution(model, prompts, method="eap", steps=9).steps == 1
    assert len(edge_attribution(model, prompts).frame) == len(edges_of(model))


def test_node_scores_survive_saving(tmp_path) -> None:
    result = node_attribution(random_bridge("llama", layers=1), random_prompts(), ablation="mean")
    result.save(tmp_path / "nodes.safetensors")
    loaded = NodeScores.load(tmp_path / "nodes.safetensors")
    assert torch.equal(loaded.scores, result.scores)
    assert loaded.frame.equals(result.frame)
    assert (loaded.method, loaded.ablation) == ("atp", "mean")


def test_node_scores_print_the_strongest_first() -> None:
    result = node_attribution(random_bridge("gpt2"), random_prompts())
    strongest = result.frame.loc[result.frame["score"].abs().idxmax(), "node"]
    assert Node.parse(str(strongest)).label in repr(result).splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "acdc"}, "eap, eap-ig, auto"),
        ({"ablation": "resample"}, "corrupted, mean, zero"),
        ({"steps": 0}, "at least 1"),
        ({"top": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        edge_attribution(random_bridge("gpt2"), random_prompts(), **arguments)
    with pytest.raises(InputError, match="atp"):
        node_attribution(random_bridge("gpt2"), random_prompts(), method="eap")


def test_progress_counts_prompts() -> None:
    seen: list[tuple[int, int]] = []
    edge_attribution(
        random_bridge("gpt2"),
        random_prompts(),
        progress=lambda stage, done, total: seen.append((done, total)),
    )
    assert seen == [(5, 8), (8, 8)]


# ---------------------------------------------------------------------- dtype, inference mode


@pytest.mark.parametrize(("make", "kv_heads"), MODELS)
@pytest.mark.parametrize("method", ["eap", "eap-ig", "auto"])
def test_bfloat16_models_are_scored_like_float32_ones(
    make: str, kv_heads: int, method: str
) -> None:
    """bfloat16 has 8 bits: scores agree to a few percent of the largest."""
    network = random_gpt2() if make == "gpt2" else random_llama(kv_heads=kv_heads)
    prompts = random_prompts()
    narrow = load_model(network.bfloat16())  # the same rounded weights in both
    wide = load_model(network.float())
    exact = edge_attribution(wide, prompts, method=method, top=3).scores
    rounded = edge_attribution(narrow, prompts, method=method, top=3).scores
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert float((rounded - exact).abs().max() / exact.abs().max()) < 0.05


def test_attribution_works_where_gradients_are_switched_off() -> None:
    """In inference mode tensors cannot be differentiated; the caller may be there, prompts too."""
    model = random_bridge("gpt2")
    outside = edge_attribution(model, random_prompts()).scores
    with torch.inference_mode():
        inside = edge_attribution(model, random_prompts()).scores
    assert torch.equal(inside, outside)
