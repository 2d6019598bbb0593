"""Edge pruning keeps what matters and lies on a path."""

from collections.abc import Callable, Mapping

import pytest
import torch
from competent_models import answered_by
from random_models import random_bridge, random_prompts
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._patched import EdgePatcher
from circuitkd.circuits.attribution import EdgeScores, edge_attribution
from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.edge_pruning import edge_threshold_sweep, prune_edges, top_edges
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.evaluation import evaluate_circuit
from circuitkd.circuits.patching import EdgeEffects, path_patching
from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts
from circuitkd.runs import MemoryCheckpoint


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    sizes = {"layers": 2, "heads": 2} | ({"kv_heads": 1} if request.param == "llama" else {})
    return random_bridge(request.param, **sizes)


def some_prompts(model: TransformerBridge) -> Prompts:
    return answered_by(model, random_prompts((6,), (4,)))


def metric_of(model: TransformerBridge, prompts: Prompts, kept: frozenset[Edge]) -> float:
    """The mean metric where all edges but these are patched."""
    gone = [edge for edge in Sizes.of(model).edges if edge not in kept]
    return float(EdgePatcher(model, prompts).metric(gone).double().mean())


def slow_acdc(
    model: TransformerBridge, prompts: Prompts, threshold: float
) -> tuple[frozenset[Edge], dict[Edge, float]]:
    """Every edge tested on its own fresh run, receivers from the logits back."""
    sizes = Sizes.of(model)
    kept, effects = frozenset(sizes.edges), {}
    start = current = metric_of(model, prompts, kept)
    for receiver in reversed(sizes.layout.receivers):
        own = [edge for edge in sizes.edges if edge.receiver == receiver]
        for edge in reversed(own):
            without = metric_of(model, prompts, kept - {edge})
            if abs(without - current) < threshold * start:
                kept, current = kept - {edge}, without
            else:
                effects[edge] = without - current
    return kept, effects


def test_acdc_equals_the_plain_loop(model: TransformerBridge) -> None:
    prompts = some_prompts(model)
    kept, effects = slow_acdc(model, prompts, 0.05)
    expected = Circuit.build(Sizes.of(model), edges=kept).on_paths()
    circuit = prune_edges(model, prompts, threshold=0.05)
    assert circuit.edge_set == expected.edge_set
    assert 0 < len(circuit.edge_set) < len(Sizes.of(model).edges)
    assert circuit.edges is not None
    for edge, score in circuit.edges.items():
        assert score == pytest.approx(effects[edge], abs=1e-4)
    # A dead end carries nothing to the logits; a source without an input carries no clean signal.
    assert metric_of(model, prompts, circuit.edge_set) == pytest.approx(
        metric_of(model, prompts, kept), abs=1e-4
    )


def test_the_published_threshold_is_held_by_the_whole_result(model: TransformerBridge) -> None:
    prompts = some_prompts(model)
    circuit = prune_edges(model, prompts, threshold=0.2, relative="published")
    full = metric_of(model, prompts, frozenset(Sizes.of(model).edges))
    left = metric_of(model, prompts, circuit.edge_set)
    assert left >= 0.8 * full - 1e-4
    assert circuit.provenance["retained_pct"] == pytest.approx(100 * left / full, abs=1e-2)
    assert len(circuit.edge_set) < len(Sizes.of(model).edges)


def test_the_search_stays_inside_a_circuit(model: TransformerBridge) -> None:
    prompts = some_prompts(model)
    inside = Circuit.build(Sizes.of(model), nodes=["a0.h0", "a1.h1", "m0", "m1"])
    circuit = prune_edges(model, prompts, inside, threshold=0.0)
    # Nothing is below a threshold of 0, so all that is on a path stays.
    assert circuit.edge_set == inside.edge_set


def test_a_weak_edge_is_tested_first_where_scores_are_known() -> None:
    """Whichever of two equal edges is tried first goes; scores decide."""
    model = random_bridge("gpt2", layers=1)
    prompts = some_prompts(model)
    sizes = Sizes.of(model)
    by_name = {edge: float(-number) for number, edge in enumerate(sizes.edges)}
    plain = prune_edges(model, prompts, threshold=0.05)
    ranked = prune_edges(model, prompts, threshold=0.05, scores=by_name)
    assert plain.edge_set != ranked.edge_set


def test_top_k_takes_the_strongest_then_drops_dead_ends() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    scores = dict.fromkeys(Sizes.of(model).edges, 0.0)
    for name, score in [
        ("input->m0", -5.0),
        ("m0->logits", 4.0),
        ("a0.h0->m1", 3.0),
        ("input->logits", 2.0),
    ]:
        scores[Edge.parse(name)] = score
    three = prune_edges(model, prompts, method="top-k", scores=scores, k=3)
    assert three.edges == {Edge.parse("input->m0"): -5.0, Edge.parse("m0->logits"): 4.0}
    assert three.node_set == {Node.parse("m0")}
    four = prune_edges(model, prompts, method="top-k", scores=scores, k=4)
    assert len(four.edge_set) == 3
    none = prune_edges(model, prompts, method="top-k", scores=scores, k=0)
    assert (len(none), none.edges) == (0, {})


def test_without_k_the_threshold_is_a_share_of_the_metric() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    full = metric_of(model, prompts, frozenset(Sizes.of(model).edges))
    weak, strong = Edge.parse("input->logits"), Edge.parse("input->m0")
    scores = {strong: 0.11 * full, weak: 0.09 * full, Edge.parse("m0->logits"): -0.2 * full}
    circuit = prune_edges(model, prompts, threshold=0.1, method="top-k", scores=scores)
    assert circuit.edge_set == set(scores) - {weak}


@pytest.mark.parametrize("find", [edge_attribution, path_patching])
def test_scores_may_be_a_result(find: Callable[..., EdgeEffects | EdgeScores]) -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    scores = find(model, prompts)
    circuit = prune_edges(model, prompts, method="top-k", scores=scores, k=30)
    assert circuit == prune_edges(model, prompts, method="top-k", scores=scores.by_edge, k=30)
    assert circuit.edges
    values = scores.effects if isinstance(scores, EdgeEffects) else scores.scores
    mean = dict(zip(scores.edges, values.double().mean(0).tolist(), strict=True))
    assert circuit.edges == {edge: mean[edge] for edge in circuit.edges}


class Dies(MemoryCheckpoint):
    """A run that is killed after its second checkpoint."""

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().put(key, tensors)
        if len(tensors["answers"]) >= 40:
            raise KeyboardInterrupt


def test_a_killed_search_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    expected = prune_edges(model, prompts, threshold=0.02)
    dying = Dies()
    with pytest.raises(KeyboardInterrupt):
        prune_edges(model, prompts, threshold=0.02, checkpoint=dying)
    calls = []
    metric = EdgePatcher.metric

    def counted(patcher: EdgePatcher, patched: object) -> torch.Tensor:
        calls.append(patched)
        return metric(patcher, patched)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(EdgePatcher, "metric", counted)
    assert prune_edges(model, prompts, threshold=0.02) == expected
    whole = len(calls)
    resumed = prune_edges(model, prompts, threshold=0.02, checkpoint=MemoryCheckpoint(dying.parts))
    assert resumed == expected
    assert len(calls) - whole == whole - 40


def test_a_sweep_says_how_size_faithfulness_and_membership_depend_on_the_threshold() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    sweep = edge_threshold_sweep(model, prompts, [0.01, 0.3], baseline=0.1)
    assert sweep.frame["threshold"].tolist() == [0.01, 0.3]
    for row in sweep.frame.to_dict("records"):
        alone = prune_edges(model, prompts, threshold=row["threshold"])
        base = prune_edges(model, prompts, threshold=0.1)
        assert sweep.circuits[row["threshold"]] == alone
        assert row["edges"] == len(alone.edges or ())
        assert row["jaccard"] == alone.jaccard(base, "edges")
        report = evaluate_circuit(model, prompts, alone, minimality=False, tests=False)
        assert row["faithfulness_pct"] == pytest.approx(report.faithfulness, abs=1e-3)
        assert row["faithfulness_pct"] == pytest.approx(alone.provenance["retained_pct"], abs=1e-3)
    assert sweep.frame["edges"].is_monotonic_decreasing


def test_ties_go_by_the_order_given() -> None:
    scores = {Edge.parse(n): 1.0 for n in ("m0->logits", "input->m0", "input->logits")}
    assert list(top_edges(scores, 2)) == list(scores)[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "Unknown method"),
        ({"method": "top-k"}, "needs scores"),
        (
            {"method": "top-k", "k": 1, "scores": {Edge.parse("m0->logits"): float("nan")}},
            "NaN or infinite, the first of m0->logits",
        ),
        ({"relative": "moon"}, "relative to circuit or published"),
        ({"k": 3}, "goes by threshold"),
        ({"method": "top-k", "k": -1}, "at least 0"),
        ({"threshold": 1.5}, "between 0 and 1"),
        ({"circuit": Circuit.build(Sizes(1, 1, 1, 1), nodes=["m0"])}, "different sizes"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    model = random_bridge("gpt2", layers=2)
    with torch.no_grad(), pytest.raises(InputError, match=message):
        prune_edges(model, some_prompts(model), **arguments)


def test_progress_counts_every_edge() -> None:
    model = random_bridge("gpt2", layers=1)
    seen: list[tuple[int, int]] = []
    circuit = Circuit.full(model)
    prune_edges(
        model, some_prompts(model), circuit, threshold=0.01,
        progress=lambda stage, done, total: seen.append((done, total)),
    )  # fmt: skip
    total = len(Sizes.of(model).edges)
    assert seen == [(n, total) for n in range(1, total + 1)]
