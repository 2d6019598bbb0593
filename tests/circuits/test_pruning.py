"""Greedy node pruning: the published procedure, replayed, and the real thing on random models."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from competent_models import answered_by
from random_models import random_bridge, random_prompts
from slow_ablation import slow_metric
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._sweeps import Decision, Scorer, greedy_sweeps
from circuitkd.circuits.pruning import prune_nodes, threshold_sweep
from circuitkd.errors import InputError, RunError
from circuitkd.nodes import Node, component_nodes
from circuitkd.prompts import Prompts
from circuitkd.runs import MemoryCheckpoint

DATA = Path(__file__).parents[1] / "data"
Kept = frozenset[Node]


# ---------------------------------------------------------------------- the recorded procedure


class FromLog:
    """A scorer that knows no model: it answers what was recorded, if asked in that order."""

    def __init__(self, nodes: tuple[Node, ...], log: list[list]) -> None:
        self.current, self.log, self.asked = frozenset(nodes), iter(log), 0

    def __call__(self, kept: Kept) -> float:
        _, name, retained, removed = next(self.log)
        assert self.current - kept == {Node.parse(name)}, f"the log asked about {name}"
        self.asked += 1
        if removed:
            self.current = kept
        return retained


@pytest.mark.parametrize(
    ("model", "evaluations", "heads", "mlps"), [("gpt2", 239, 14, 11), ("distilgpt2", 186, 7, 6)]
)
def test_replaying_the_recorded_scores_gives_the_published_circuit(
    model: str, evaluations: int, heads: int, mlps: int
) -> None:
    recorded = json.loads((DATA / f"numerals_log_{model}.json").read_text())
    nodes = component_nodes(recorded["layers_looped"], recorded["n_heads"])
    scorer = FromLog(nodes, recorded["log"])
    pruned = greedy_sweeps(nodes, scorer, recorded["threshold_pct"] / 100)
    # The recording looped over twelve layers for the six-layer model as well.
    kept = {node for node in pruned.kept if (node.layer or 0) < recorded["n_layers"]}
    assert kept == {Node.parse(name) for name in recorded["circuit"]}
    assert scorer.asked == len(recorded["log"]) == evaluations
    assert [d.removed for d in pruned.decisions] == [removed for *_, removed in recorded["log"]]
    assert sum(n.kind == "head" for n in kept) == heads
    assert sum(n.kind == "mlp" for n in kept) == mlps


# ---------------------------------------------------------------------- rules of the sweeps

NODES = component_nodes(2, 2)


def names(decisions: tuple[Decision, ...], sweep: int) -> list[str]:
    return [d.node.name for d in decisions if d.sweep == sweep]


def once_removable(*removable: str) -> Scorer:
    """A scorer that can do without these nodes, and without no other."""
    free = {Node.parse(name) for name in removable}
    return lambda kept: 100.0 if set(NODES) - kept <= free else 0.0


def test_the_sweeps_go_back_and_forth_until_one_changes_nothing() -> None:
    pruned = greedy_sweeps(NODES, once_removable("a0.h1"), 0.2)
    assert names(pruned.decisions, 1) == ["m1", "a1.h0", "a1.h1", "m0", "a0.h0", "a0.h1"]
    assert names(pruned.decisions, 2) == ["a0.h0", "m0", "a1.h0", "a1.h1", "m1"]
    assert len(pruned.decisions) == 6 + 5
    assert pruned.last_sweep == pruned.decisions[6:]


def test_a_sweep_that_changes_nothing_at_once_is_the_only_one() -> None:
    pruned = greedy_sweeps(NODES, once_removable(), 0.2)
    assert pruned.kept == set(NODES)
    assert len(pruned.decisions) == 6


def test_forward_first_begins_at_the_input() -> None:
    pruned = greedy_sweeps(NODES, once_removable(), 0.2, order="forward-first")
    assert names(pruned.decisions, 1) == [node.name for node in NODES]


def test_an_order_of_ones_own_is_followed_then_reversed() -> None:
    order = [Node.parse(n) for n in ("m0", "a1.h1", "a0.h0", "m1", "a1.h0", "a0.h1")]
    pruned = greedy_sweeps(NODES, once_removable("m0"), 0.2, order=order)
    assert names(pruned.decisions, 1) == [node.name for node in order]
    assert names(pruned.decisions, 2) == [node.name for node in reversed(order[1:])]


def test_the_budget_is_cumulative_and_strict() -> None:
    """Each node is worth 10 %; a loss of exactly 20 % is too much, so one may go."""

    def retained(kept: Kept) -> float:
        return 100.0 - 10 * (len(NODES) - len(kept))

    assert len(greedy_sweeps(NODES, retained, 0.2).kept) == len(NODES) - 1
    assert len(greedy_sweeps(NODES, retained, 0.21).kept) == len(NODES) - 2


def test_relative_to_the_circuit_losses_add_up() -> None:
    def retained(kept: Kept) -> float:
        return 100.0 * 0.9 ** (len(NODES) - len(kept))

    assert greedy_sweeps(NODES, retained, 0.2, relative_to="circuit").kept == frozenset()
    assert len(greedy_sweeps(NODES, retained, 0.05, relative_to="circuit").kept) == len(NODES)


def test_a_circuit_can_be_empty() -> None:
    pruned = greedy_sweeps(NODES, lambda kept: 100.0, 0.2)
    assert pruned.kept == frozenset()
    assert pruned.last_sweep == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 20.0}, "between 0 and 1"),
        ({"order": "sideways"}, "Unknown order"),
        ({"order": NODES[1:]}, "exactly once"),
        ({"relative_to": "moon"}, "relative to full or circuit"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        greedy_sweeps(NODES, lambda kept: 100.0, **{"threshold": 0.2, **arguments})


# ---------------------------------------------------------------------- real models


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return random_bridge(request.param, layers=2, heads=4)


def some_prompts(model: TransformerBridge) -> Prompts:
    return answered_by(model, random_prompts())


@pytest.mark.parametrize("ablation", ["mean", "zero", "resample"])
def test_pruning_equals_the_procedure_on_slow_runs(model: TransformerBridge, ablation: str) -> None:
    prompts = some_prompts(model)
    nodes = component_nodes(2, 4)
    full = slow_metric(model, prompts, nodes, ablation).double().mean()

    def retained(kept: Kept) -> float:
        return float(100 * slow_metric(model, prompts, kept, ablation).double().mean() / full)

    slow = greedy_sweeps(nodes, retained, 0.3)
    circuit = prune_nodes(model, prompts, 0.3, ablation=ablation)
    assert circuit.node_set == slow.kept
    ours = circuit.provenance["decisions"]
    assert [(s, n, r) for s, n, _, r in ours] == [
        (d.sweep, d.node.name, d.removed) for d in slow.decisions
    ]
    assert [pct for *_, pct, _ in ours] == pytest.approx(
        [d.retained_pct for d in slow.decisions], abs=1e-2
    )


def test_a_nodes_score_is_what_leaving_it_out_of_the_circuit_does() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    circuit = prune_nodes(model, prompts)
    whole = slow_metric(model, prompts, circuit.nodes, "mean")
    assert circuit.nodes
    for node, score in circuit.nodes.items():
        without = slow_metric(model, prompts, circuit.node_set - {node}, "mean")
        assert score == pytest.approx(float((without - whole).mean()), abs=1e-4)


def test_the_circuit_holds_the_threshold() -> None:
    model = random_bridge("llama", layers=2)
    prompts = some_prompts(model)
    circuit = prune_nodes(model, prompts, 0.4)
    share = (
        slow_metric(model, prompts, circuit.nodes, "mean").mean()
        / slow_metric(model, prompts, component_nodes(2, 4), "mean").mean()
    )
    assert 100 * share > 60
    assert 100 * share == pytest.approx(circuit.provenance["retained_pct"], abs=1e-2)


class Dies(MemoryCheckpoint):
    """A run that is killed after its first checkpoint."""

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().put(key, tensors)
        if len(self.parts) == 1:
            raise KeyboardInterrupt


def test_a_killed_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_bridge("gpt2")
    prompts = some_prompts(model)
    expected = prune_nodes(model, prompts)
    monkeypatch.setattr("circuitkd.circuits._recorded._SAVED_EVERY", 5)
    dying = Dies()
    with pytest.raises(KeyboardInterrupt):
        prune_nodes(model, prompts, checkpoint=dying)
    monkeypatch.setattr("circuitkd.circuits._recorded._SAVED_EVERY", 10**9)
    stored = dying.parts["pruning"]["answers"]
    assert len(stored) == 5
    stored[3] += 0.125  # so that we see whether the stored value is what is used
    going_on = MemoryCheckpoint(dict(dying.parts))
    circuit = prune_nodes(model, prompts, checkpoint=going_on)
    assert circuit.node_set == expected.node_set
    theirs, ours = (c.provenance["decisions"] for c in (expected, circuit))
    assert [row[2] for row in ours][3] == pytest.approx(theirs[3][2] + 0.125)
    assert ours[4:] == theirs[4:]
    assert len(going_on.parts["pruning"]["answers"]) > 5


def test_progress_counts_the_candidates_of_a_sweep() -> None:
    seen: list[tuple[str, int, int]] = []
    model = random_bridge("gpt2", layers=2)
    prune_nodes(model, some_prompts(model), progress=lambda *at: seen.append(at))
    stage, done, total = seen[0]
    assert "sweep 1" in stage
    assert (done, total) == (0, 10)
    assert max(done for _, done, _ in seen) == 9


def test_a_model_that_fails_the_task_is_refused() -> None:
    model = random_bridge("gpt2")
    prompts = some_prompts(model)
    swapped = tuple(
        dataclasses.replace(g, correct=g.incorrect, incorrect=g.correct) for g in prompts.groups
    )
    with pytest.raises(RunError, match="does not do this task"):
        prune_nodes(model, dataclasses.replace(prompts, groups=swapped))


def test_a_threshold_sweep_says_size_faithfulness_and_overlap() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    sweep = threshold_sweep(model, prompts, [0.4, 0.1])
    frame = sweep.frame.set_index("threshold")
    assert list(frame.index) == [0.1, 0.4]
    assert frame.loc[0.1, "nodes"] > frame.loc[0.4, "nodes"]
    for threshold, row in frame.iterrows():
        assert isinstance(threshold, float)
        alone = prune_nodes(model, prompts, threshold)
        assert row["faithfulness_pct"] == pytest.approx(alone.provenance["retained_pct"], abs=1e-2)
        assert row["faithfulness_low"] <= row["faithfulness_pct"] <= row["faithfulness_high"]
        assert sweep.circuits[threshold].node_set == alone.node_set
        assert row["jaccard"] == pytest.approx(alone.jaccard(prune_nodes(model, prompts, 0.2)))
    assert "faithfulness_pct" in repr(sweep)
    assert "at 2 thresholds" in repr(sweep)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
