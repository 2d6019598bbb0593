"""Every supported architecture: the engines equal the obvious way of computing the same."""

import pytest
import torch
from architectures.networks import NAMES, network
from circuits.slow_patching import joined, receiver_hooks, run, sender_values, slow_effect
from circuits.slow_patching import slow_patched_logits as slow_logits
from random_models import random_prompts
from slow_ablation import slow_metric
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model, node_influence
from circuitkd.circuits.ablated import NodeAblator
from circuitkd.circuits.attribution import edge_attribution, node_attribution
from circuitkd.circuits.edges import Edge, edges_of, layout_of
from circuitkd.circuits.engine import Replay
from circuitkd.circuits.patching import MODES, patched_run, path_patching
from circuitkd.errors import InputError
from circuitkd.models import FAMILIES, component_nodes_of
from circuitkd.prompts import PromptGroup

TOLERANCE = 1e-4
PARALLEL = ("gpt-neox", "phi")
ENCODERS = ("bert", "roberta", "distilbert")
ANSWER = {name: 4 if name in ENCODERS else -1 for name in NAMES}  # encoders: between the words
PROMPTS = {name: random_prompts((7,), (3,), means=6, answer=ANSWER[name]) for name in NAMES}
GROUPS = {name: prompts.groups[0] for name, prompts in PROMPTS.items()}
(GROUP,) = random_prompts((7,), (3,), means=6).groups


def difference(logits: Tensor) -> Tensor:
    rows = torch.arange(len(logits))
    return logits[rows, GROUP.correct] - logits[rows, GROUP.incorrect]


def some_edges(name: str, every: int) -> list[Edge]:
    chosen = list(edges_of(load_model(network(name)))[::every])
    assert {edge.receiver.kind for edge in chosen} == {"q", "k", "v", "mlp", "logits"}
    return chosen


def patched(model: TransformerBridge, group: PromptGroup, edge: Edge, change: Tensor) -> Tensor:
    hooks = receiver_hooks(model, group, edge, change)
    return run(model, group.clean, hooks, group.answer)


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
def test_residual_writes_join_to_the_residual_stream(name: str) -> None:
    model = load_model(network(name))
    replay = Replay(model, GROUP.clean, ANSWER[name])
    stream = replay.embed(GROUP.clean)
    assert replay.parallel == (name in PARALLEL)
    for layer in range(replay.n_layers):
        seen = replay.observe(layer, stream)
        bias = getattr(model.blocks[layer].attn, "b_O", None)
        attention = replay.head_writes(layer, seen.z).sum(-2) + (0 if bias is None else bias)
        mid = joined(model, layer, "attention", stream, attention).detach()
        torch.testing.assert_close(mid, seen.mid, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            seen.read, stream if replay.parallel else seen.mid, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(replay.mlp(layer, seen.read), seen.mlp, atol=1e-5, rtol=0)
        post = joined(model, layer, "mlp", seen.mid, seen.mlp).detach()
        torch.testing.assert_close(post, seen.post, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            replay.finish(layer, stream, seen.mid), seen.post, atol=1e-5, rtol=0
        )
        stream = seen.post
    with torch.no_grad():
        torch.testing.assert_close(
            replay.end_logits(stream[:, ANSWER[name]]),
            model(GROUP.clean)[:, ANSWER[name]],
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("ablation", ["mean", "zero", "resample"])
@pytest.mark.parametrize("name", NAMES)
def test_node_ablation_equals_one_hooked_run_per_node(name: str, ablation: str) -> None:
    model = load_model(network(name))
    nodes = component_nodes_of(model)
    ours = node_influence(model, PROMPTS[name], ablation=ablation)
    clean = slow_metric(model, PROMPTS[name], nodes, ablation)
    for column, node in enumerate(nodes):
        theirs = slow_metric(model, PROMPTS[name], set(nodes) - {node}, ablation) - clean
        torch.testing.assert_close(ours.effects[:, column], theirs, atol=TOLERANCE, rtol=0)
    assert (ours.effects.abs().max(0).values > 10 * TOLERANCE).all()


@pytest.mark.parametrize("name", NAMES)
def test_ablating_many_nodes_equals_hooks_on_all_of_them(name: str) -> None:
    model = load_model(network(name))
    nodes = component_nodes_of(model)
    runs = NodeAblator(model, PROMPTS[name])
    for seed in range(4):
        take = torch.rand(len(nodes), generator=torch.Generator().manual_seed(seed)) < 0.6
        kept = [node for node, keep in zip(nodes, take.tolist(), strict=True) if keep]
        theirs = slow_metric(model, PROMPTS[name], kept, "mean")
        torch.testing.assert_close(runs.metric(kept), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_path_patching_equals_one_hooked_run_per_edge(name: str, mode: str) -> None:
    model, edges = load_model(network(name)), some_edges(name, 5)
    fast = path_patching(model, PROMPTS[name], edges=edges, mode=mode).effects
    slow = torch.stack(
        [slow_effect(model, GROUPS[name], edge, difference, mode) for edge in edges], 1
    )
    assert (slow.abs().max(0).values > 10 * TOLERANCE).float().mean() > 0.9  # edges do something
    torch.testing.assert_close(fast[GROUP.index], slow, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_sets_of_edges_equal_adding_up_every_receivers_input(name: str) -> None:
    model, at = load_model(network(name)), ANSWER[name]
    edges, layout = edges_of(model), layout_of(model)
    with torch.no_grad():
        runs = {0.0: model(GROUP.clean)[:, at], 1.0: model(GROUP.corrupted)[:, at]}
    for share in (0.0, 0.5, 1.0):
        chosen = torch.rand(len(edges), generator=torch.Generator().manual_seed(1)) < share
        patched = {edge for edge, take in zip(edges, chosen.tolist(), strict=True) if take}
        logits = runs[share] if share in runs else slow_logits(model, GROUPS[name], patched, layout)
        ours = patched_run(model, PROMPTS[name], patched)[GROUP.index]
        torch.testing.assert_close(ours, difference(logits), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_attribution_is_the_derivative_along_the_senders_change(name: str) -> None:
    model, edges, step = load_model(network(name)), some_edges(name, 9), 1e-2
    result = edge_attribution(model, PROMPTS[name], method="eap")
    assert result.edges == edges_of(model)
    for edge in edges:
        change = sender_values(model, GROUPS[name], edge.sender, "corrupted")
        change = change - sender_values(model, GROUPS[name], edge.sender, "clean")
        up, down = (
            difference(patched(model, GROUPS[name], edge, size * change)) for size in (step, -step)
        )
        ours = result.scores[GROUP.index, result.edges.index(edge)]
        torch.testing.assert_close(ours, (up - down) / (2 * step), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_the_scores_of_a_nodes_edges_sum_to_the_nodes_score(name: str) -> None:
    model = load_model(network(name))
    nodes = node_attribution(model, PROMPTS[name])
    edges = edge_attribution(model, PROMPTS[name], method="eap")
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
            path_patching(model, PROMPTS[name], edges=["a1.h0->m1"])
