"""Every supported architecture: the engines equal the obvious way of computing the same."""

import pytest
import torch
from architectures.networks import NAMES, network
from circuits.slow_patching import receiver_hooks, run, sender_values, slow_effect
from circuits.slow_patching import slow_patched_logits as slow_logits
from random_models import random_prompts
from slow_ablation import slow_metric
from torch import Tensor

from circuitkd import load_model, node_influence
from circuitkd.circuits.ablated import NodeAblator
from circuitkd.circuits.attribution import edge_attribution, node_attribution
from circuitkd.circuits.edges import Edge, edges_of, layout_of
from circuitkd.circuits.engine import Replay
from circuitkd.circuits.patching import MODES, patched_run, path_patching
from circuitkd.errors import InputError
from circuitkd.metrics import logit_difference
from circuitkd.models import FAMILIES, component_nodes_of
from circuitkd.prompts import PromptGroup

TOLERANCE = 1e-4
PARALLEL = ("gpt-neox", "phi")
PROMPTS = random_prompts((7,), (3,), means=6)
(GROUP,) = PROMPTS.groups


def difference(logits: Tensor, group: PromptGroup = GROUP) -> Tensor:
    return logit_difference(logits, group.correct, group.incorrect)


def some_edges(name: str, every: int) -> list[Edge]:
    chosen = list(edges_of(load_model(network(name)))[::every])
    assert {edge.receiver.kind for edge in chosen} == {"q", "k", "v", "mlp", "logits"}
    return chosen


def test_every_supported_class_is_tried_here() -> None:
    tried = {type(network(name)).__name__ for name in NAMES}
    assert tried == {name for family in FAMILIES for name in family.architectures}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_hugging_face(name: str) -> None:
    original = network(name)
    with torch.no_grad():
        theirs, ours = original(GROUP.clean).logits, load_model(original)(GROUP.clean)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_residual_writes_sum_to_the_residual_stream(name: str) -> None:
    model = load_model(network(name))
    replay = Replay(model, GROUP.clean)
    stream = replay.embed(GROUP.clean)
    assert replay.parallel == (name in PARALLEL)
    for layer in range(replay.n_layers):
        seen = replay.observe(layer, stream)
        bias = getattr(model.blocks[layer].attn, "b_O", None)
        attention = replay.head_writes(layer, seen.z).sum(-2) + (0 if bias is None else bias)
        torch.testing.assert_close(stream + attention, seen.mid, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            seen.read, stream if replay.parallel else seen.mid, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(replay.mlp(layer, seen.read), seen.mlp, atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.mid + seen.mlp, seen.post, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            replay.finish(layer, stream, seen.mid), seen.post, atol=1e-5, rtol=0
        )
        stream = seen.post
    with torch.no_grad():
        torch.testing.assert_close(
            replay.end_logits(stream[:, -1]), model(GROUP.clean)[:, -1], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("ablation", ["mean", "zero", "resample"])
@pytest.mark.parametrize("name", NAMES)
def test_node_ablation_equals_one_hooked_run_per_node(name: str, ablation: str) -> None:
    model = load_model(network(name))
    nodes = component_nodes_of(model)
    ours = node_influence(model, PROMPTS, ablation=ablation)
    clean = slow_metric(model, PROMPTS, nodes, ablation)
    for column, node in enumerate(nodes):
        theirs = slow_metric(model, PROMPTS, set(nodes) - {node}, ablation) - clean
        torch.testing.assert_close(ours.effects[:, column], theirs, atol=TOLERANCE, rtol=0)
    assert (ours.effects.abs().max(0).values > 10 * TOLERANCE).all()


@pytest.mark.parametrize("name", NAMES)
def test_ablating_many_nodes_equals_hooks_on_all_of_them(name: str) -> None:
    model = load_model(network(name))
    nodes = component_nodes_of(model)
    runs = NodeAblator(model, PROMPTS)
    for seed in range(4):
        take = torch.rand(len(nodes), generator=torch.Generator().manual_seed(seed)) < 0.6
        kept = [node for node, keep in zip(nodes, take.tolist(), strict=True) if keep]
        theirs = slow_metric(model, PROMPTS, kept, "mean")
        torch.testing.assert_close(runs.metric(kept), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_path_patching_equals_one_hooked_run_per_edge(name: str, mode: str) -> None:
    model, edges = load_model(network(name)), some_edges(name, 5)
    fast = path_patching(model, PROMPTS, edges=edges, mode=mode).effects
    slow = torch.stack([slow_effect(model, GROUP, edge, difference, mode) for edge in edges], 1)
    assert (slow.abs().max(0).values > 10 * TOLERANCE).float().mean() > 0.9  # edges do something
    torch.testing.assert_close(fast[GROUP.index], slow, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_sets_of_edges_equal_adding_up_every_receivers_input(name: str) -> None:
    model = load_model(network(name))
    edges, layout = edges_of(model), layout_of(model)
    with torch.no_grad():
        runs = {0.0: model(GROUP.clean)[:, -1], 1.0: model(GROUP.corrupted)[:, -1]}
    for share in (0.0, 0.5, 1.0):
        chosen = torch.rand(len(edges), generator=torch.Generator().manual_seed(1)) < share
        patched = {edge for edge, take in zip(edges, chosen.tolist(), strict=True) if take}
        logits = runs[share] if share in runs else slow_logits(model, GROUP, patched, layout)
        ours = patched_run(model, PROMPTS, patched)[GROUP.index]
        torch.testing.assert_close(ours, difference(logits), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_attribution_is_the_derivative_along_the_senders_change(name: str) -> None:
    model, edges, step = load_model(network(name)), some_edges(name, 9), 1e-2
    result = edge_attribution(model, PROMPTS, method="eap")
    assert result.edges == edges_of(model)
    for edge in edges:
        change = sender_values(model, GROUP, edge.sender, "corrupted")
        change = change - sender_values(model, GROUP, edge.sender, "clean")
        up, down = (
            difference(run(model, GROUP.clean, receiver_hooks(model, GROUP, edge, size * change)))
            for size in (step, -step)
        )
        ours = result.scores[GROUP.index, result.edges.index(edge)]
        torch.testing.assert_close(ours, (up - down) / (2 * step), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_the_scores_of_a_nodes_edges_sum_to_the_nodes_score(name: str) -> None:
    model = load_model(network(name))
    nodes = node_attribution(model, PROMPTS)
    edges = edge_attribution(model, PROMPTS, method="eap")
    for column, node in enumerate(nodes.nodes):
        leaving = [number for number, edge in enumerate(edges.edges) if edge.sender == node]
        total = edges.scores[:, leaving].sum(1)
        torch.testing.assert_close(total, nodes.scores[:, column], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_parallel_blocks_have_no_edge_from_a_layers_heads_to_its_mlp(name: str) -> None:
    model = load_model(network(name))
    has = Edge.parse("a1.h0->m1") in edges_of(model)
    assert has == (name not in PARALLEL)
    if not has:
        with pytest.raises(InputError, match="in parallel"):
            path_patching(model, PROMPTS, edges=["a1.h0->m1"])
