"""Evaluation of circuits: its runs are what they say, and its numbers what their words mean."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from competent_models import answered_by
from gates import gate_circuit, gate_model, gate_prompts
from random_models import random_bridge, random_prompts
from slow_ablation import slow_metric
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.circuit_runs import CircuitRuns
from circuitkd.circuits.curves import MIB_GRID, cmd, cpr, faithfulness_curve, recovery
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.evaluation import CircuitReport, evaluate_circuit
from circuitkd.circuits.influence import ABLATIONS
from circuitkd.errors import InputError, RunError
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

NAMES = ("a0.h0", "a0.h3", "m0", "a1.h2")


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    return random_bridge(request.param, layers=2)


def some_prompts(model: TransformerBridge) -> Prompts:
    return answered_by(model, random_prompts((6, 5), (4, 3)))


def some_circuit(model: TransformerBridge) -> Circuit:
    return Circuit.build(Sizes.of(model), nodes=NAMES)


def listed(circuit: Circuit) -> Circuit:
    """The same circuit with its edges written out."""
    return dataclasses.replace(circuit, edges=dict.fromkeys(circuit.edge_set))


# ---------------------------------------------------------------------- the runs


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_the_runs_are_those_of_hooks_on_every_ablated_node(
    model: TransformerBridge, ablation: str
) -> None:
    prompts, circuit = some_prompts(model), some_circuit(model)
    everything = set(circuit.sizes.nodes)
    report = evaluate_circuit(model, prompts, circuit, ablation=ablation, tests=False)
    for ours, kept in [
        (report.full, everything),
        (report.kept, circuit.node_set),
        (report.without, everything - circuit.node_set),
        (report.nothing, set()),
    ]:
        expected = slow_metric(model, prompts, kept, ablation)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    for column, node in enumerate(circuit.nodes):
        without = slow_metric(model, prompts, circuit.node_set - {node}, ablation)
        torch.testing.assert_close(
            report.node_effects[:, column], without - report.kept, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_a_circuit_of_nodes_runs_like_the_circuit_of_all_edges_between_them(
    model: TransformerBridge, ablation: str
) -> None:
    """Node runs keep every edge out of a kept node; those into ablated nodes carry nothing on."""
    prompts, circuit = some_prompts(model), some_circuit(model)
    nodes = CircuitRuns(model, prompts, "nodes", ablation=ablation)
    edges = CircuitRuns(model, prompts, "edges", ablation=ablation)
    own = {edge for edge in circuit.sizes.edges if edge.sender in {Node("input"), *circuit.nodes}}
    torch.testing.assert_close(edges.metric(own), nodes.metric(circuit.nodes), atol=1e-4, rtol=0)
    if ablation == "resample":
        torch.testing.assert_close(
            edges.metric(circuit.edge_set), nodes.metric(circuit.nodes), atol=1e-4, rtol=0
        )


def test_all_edges_are_the_clean_run_and_none_the_corrupted_one(model: TransformerBridge) -> None:
    prompts = some_prompts(model)
    runs = CircuitRuns(model, prompts, "edges", ablation="resample")
    swapped = tuple(dataclasses.replace(g, clean=g.corrupted) for g in prompts.groups)
    corrupted = dataclasses.replace(prompts, groups=swapped)
    for ours, those in ((runs.full(), prompts), (runs.metric(()), corrupted)):
        expected = slow_metric(model, those, Sizes.of(model).nodes, "zero")
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_edges_are_left_out_one_at_a_time(model: TransformerBridge) -> None:
    prompts = some_prompts(model)
    names = ["input->a0.h0<q>", "a0.h0->m1", "m1->logits", "input->m1"]
    circuit = Circuit.build(Sizes.of(model), edges=names)
    report = evaluate_circuit(model, prompts, circuit, ablation="resample", tests=False)
    runs = CircuitRuns(model, prompts, "edges", ablation="resample")
    kept = runs.metric(circuit.edge_set)
    for column, edge in enumerate(circuit.edges or ()):
        expected = runs.metric(circuit.edge_set - {edge}) - kept
        torch.testing.assert_close(report.edge_effects[:, column], expected, atol=1e-5, rtol=0)
    # Without m1, its edges go: input->a0.h0->m1 leads nowhere, and nothing is left.
    column = list(circuit.nodes).index(Node.parse("m1"))
    torch.testing.assert_close(
        report.node_effects[:, column], report.nothing - kept, atol=1e-4, rtol=0
    )


# ---------------------------------------------------------------------- words and numbers


def test_faithfulness_and_completeness_are_shares_of_the_full_metric() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    report = evaluate_circuit(model, prompts, some_circuit(model), tests=False)
    full = float(report.full.mean())
    assert report.faithfulness == pytest.approx(100 * float(report.kept.mean()) / full)
    assert report.completeness == pytest.approx(100 * float(report.without.mean()) / full)
    row = report.frame.set_index("run").loc["circuit (faithfulness)"]
    assert row["percent_low"] < row["percent"] < row["percent_high"]
    assert report.frame.set_index("run").loc["full model", "percent_low"] == pytest.approx(100)


def test_the_whole_model_is_faithful_and_complete(model: TransformerBridge) -> None:
    report = evaluate_circuit(model, some_prompts(model), Circuit.full(model), minimality=False)
    assert report.faithfulness == pytest.approx(100, abs=1e-3)
    torch.testing.assert_close(report.without, report.nothing)
    assert report.tests is not None
    rejected = report.tests.frame.set_index("test")["rejected"]
    # The rest is the input alone; whether it knows something depends on the model.
    assert not rejected[["equivalence", "minimality"]].any()


@pytest.mark.parametrize("edges", [None, {}])
def test_the_empty_circuit_is_the_fully_ablated_model(edges: dict | None) -> None:
    model = random_bridge("gpt2", layers=2)
    circuit = Circuit(Sizes.of(model), {}, edges)
    report = evaluate_circuit(model, some_prompts(model), circuit)
    torch.testing.assert_close(report.kept, report.nothing)
    torch.testing.assert_close(report.without, report.full)
    assert report.nodes.empty
    assert report.edges.empty
    assert "0 nodes" in repr(report)


def test_percentages_are_withheld_where_the_model_fails_the_task() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts = some_prompts(model)
    swapped = tuple(
        dataclasses.replace(g, correct=g.incorrect, incorrect=g.correct) for g in prompts.groups
    )
    failing = dataclasses.replace(prompts, groups=swapped)
    report = evaluate_circuit(model, failing, some_circuit(model), tests=False)
    assert not report.competent
    assert np.isnan(report.faithfulness)
    assert report.nodes["percent"].isna().all()
    assert report.frame["value"].notna().all()
    assert "percentages are withheld" in repr(report)


def test_a_report_prints_as_a_table_and_comes_back_from_its_file(tmp_path: Path) -> None:
    model = gate_model("and")
    circuit = gate_circuit(model)
    scores = dict.fromkeys(circuit.sizes.edges, 0.0) | dict.fromkeys(circuit.edge_set, 1.0)
    report = evaluate_circuit(
        model, gate_prompts(), circuit, ablation="resample", scores=scores, known=circuit
    )
    text = repr(report)
    for word in ("faithfulness", "completeness", "CPR", "AUROC 1.000", "minimality"):
        assert word in text
    report.save(tmp_path / "report.json")
    again = CircuitReport.load(tmp_path / "report.json")
    assert repr(again) == text
    assert again.circuit == circuit
    torch.testing.assert_close(again.edge_effects, report.edge_effects)
    with pytest.raises(InputError, match="no circuit file"):
        CircuitReport.load(tmp_path / "missing.json")


def test_a_report_with_undefined_numbers_comes_back_too(tmp_path: Path) -> None:
    model = random_bridge("gpt2", layers=1)
    nothing = Circuit(Sizes.of(model), {})
    report = evaluate_circuit(model, some_prompts(model), nothing, known=nothing)
    report.save(tmp_path / "report.json")
    again = CircuitReport.load(tmp_path / "report.json")
    assert again.recovery is not None
    assert np.isnan(again.recovery.auroc)
    assert repr(again) == repr(report)
    assert again.curve is None


def test_a_circuit_of_another_model_is_refused() -> None:
    model = random_bridge("gpt2", layers=2)
    other = Circuit.build(Sizes(1, 4, 4, 32), nodes=["m0"])
    with pytest.raises(InputError, match="different sizes"):
        evaluate_circuit(model, some_prompts(model), other)
    with pytest.raises(InputError, match="Unknown ablation"):
        evaluate_circuit(model, some_prompts(model), some_circuit(model), ablation="noise")


def test_wrong_input_is_told_before_the_parts_are_left_out() -> None:
    model = random_bridge("gpt2", layers=2)
    stages: list[str] = []
    wrong: list[dict[str, Any]] = [
        {"known": Circuit.build(Sizes(1, 4, 4, 32), nodes=["m0"])},
        {"scores": {}},
    ]
    for argument in wrong:
        with pytest.raises(InputError):
            evaluate_circuit(
                model,
                some_prompts(model),
                some_circuit(model),
                progress=lambda stage, *_: stages.append(stage),
                **argument,
            )
    assert stages == []


def test_progress_counts_every_part_that_is_left_out() -> None:
    model = random_bridge("gpt2", layers=2)
    seen: dict[str, list[tuple[int, int]]] = {}
    circuit = some_circuit(model)
    evaluate_circuit(
        model,
        some_prompts(model),
        circuit,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    parts = len(circuit.nodes) + len(circuit.edges or ())
    counted = [(n, parts) for n in range(1, parts + 1)]
    assert seen["Leaving out parts"] == counted
    assert seen["Testing minimality"] == counted


# ---------------------------------------------------------------------- curves


def test_mibs_areas_on_mibs_grid() -> None:
    ones, zeros = [1.0] * len(MIB_GRID), [0.0] * len(MIB_GRID)
    assert cpr(MIB_GRID, ones) == pytest.approx(0.999)
    assert cmd(MIB_GRID, ones) == 0
    assert cpr(MIB_GRID, zeros) == 0
    assert cmd(MIB_GRID, zeros) == pytest.approx(0.999)
    assert (
        cmd([0.0, 1.0], [2.0, 2.0]) == cpr([0.0, 1.0], [1.0, 1.0]) == 1
    )  # too much is as far as too little


def test_the_curve_of_and_jumps_when_its_last_edge_is_in() -> None:
    model = gate_model("and")
    known = gate_circuit(model)
    n_edges = len(known.sizes.edges)
    scores = dict.fromkeys(known.sizes.edges, 0.0) | dict.fromkeys(known.edge_set, -1.0)
    scores[Edge.parse("m0->logits")] = 2.0
    curve = faithfulness_curve(model, gate_prompts(), scores, grid=[4 / n_edges, 5 / n_edges, 1.0])
    assert curve.frame["faithfulness"].tolist() == pytest.approx([0, 1, 1], abs=0.01)
    assert curve.frame["parts"].tolist() == [3, 5, n_edges]  # one branch of four edges is cut off
    assert curve.cpr == pytest.approx(1 - 4.5 / n_edges, abs=0.01)


def test_a_curve_over_nodes_takes_the_strongest_first() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts, sizes = some_prompts(model), Sizes.of(model)
    scores = {node: float(number) for number, node in enumerate(sizes.nodes)}
    curve = faithfulness_curve(model, prompts, scores, grid=[0.3], ablation="mean")
    runs = CircuitRuns(model, prompts, "nodes")
    full, nothing, own = (runs.metric(kept).mean() for kept in (sizes.nodes, (), sizes.nodes[-3:]))
    assert curve.frame["parts"].tolist() == [3]
    expected = float((own - nothing) / (full - nothing))
    assert curve.frame["faithfulness"][0] == pytest.approx(expected, abs=1e-4)


def test_a_curve_says_how_parts_were_ranked_and_that_decides_which_come_first() -> None:
    model = random_bridge("gpt2", layers=2)
    prompts, sizes = some_prompts(model), Sizes.of(model)
    helps, hinders = sizes.nodes[3], sizes.nodes[8]
    scores = {helps: -1.0, hinders: 2.0}
    runs = CircuitRuns(model, prompts, "nodes", ablation="resample")
    full, nothing = (float(runs.metric(kept).mean()) for kept in (sizes.nodes, ()))
    for ranking, first in (("magnitude", hinders), ("signed", helps)):
        curve = faithfulness_curve(model, prompts, scores, grid=[0.1], ranking=ranking)
        own = float(runs.metric([first]).mean())
        expected = (own - nothing) / (full - nothing)
        assert curve.frame["faithfulness"][0] == pytest.approx(expected, abs=1e-4)
        assert curve.ranking == ranking
        assert f"ranked by {ranking}" in repr(curve)


def test_scores_and_grids_are_checked() -> None:
    model = random_bridge("gpt2", layers=1)
    prompts, scores = some_prompts(model), {Node.parse("m0"): 1.0}
    with pytest.raises(InputError, match="there must be some"):
        faithfulness_curve(model, prompts, {})
    mixed = {**scores, Edge.parse("m0->logits"): 1.0}
    with pytest.raises(InputError, match="nodes only or of edges only"):
        faithfulness_curve(model, prompts, mixed)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no m7"):
        faithfulness_curve(model, prompts, {Node.parse("m7"): 1.0})
    with pytest.raises(InputError, match="magnitude, signed"):
        faithfulness_curve(model, prompts, scores, ranking="absolute")
    with pytest.raises(InputError, match="m0 is NaN"):
        faithfulness_curve(model, prompts, {Node.parse("m0"): float("nan")})
    for grid in ([], [0.5, 0.5], [0.5, 2.0]):
        with pytest.raises(InputError, match="grid must increase"):
            faithfulness_curve(model, prompts, scores, grid=grid)


def test_no_curve_where_ablation_changes_nothing() -> None:
    model = random_bridge("gpt2", layers=1)
    prompts = some_prompts(model)
    same = tuple(dataclasses.replace(g, corrupted=g.clean) for g in prompts.groups)
    with pytest.raises(RunError, match="changes nothing"):
        faithfulness_curve(
            model, dataclasses.replace(prompts, groups=same), {Node.parse("m0"): 1.0}
        )


# ---------------------------------------------------------------------- recovery

SIZES = Sizes(n_layers=1, n_heads=2, n_kv_heads=2, d_model=8)


def nodes(*names: str) -> Circuit:
    return Circuit.build(SIZES, nodes=names)


def test_precision_recall_and_auroc() -> None:
    found = recovery(nodes("a0.h0", "a0.h1"), nodes("a0.h0", "m0"), level="nodes")
    assert (found.precision, found.recall, found.f1) == (0.5, 0.5, 0.5)
    assert found.auroc == pytest.approx(0.25)  # one of two hit, the only other part taken


def test_scores_rank_by_size_whatever_their_sign() -> None:
    known = nodes("a0.h0")
    scores = dict(zip(SIZES.nodes, [-9.0, 1.0, 2.0], strict=True))
    assert recovery(nodes(), known, level="nodes", scores=scores).auroc == 1.0
    scores = dict(zip(SIZES.nodes, [-1.0, 3.0, 2.0], strict=True))
    assert recovery(nodes(), known, level="nodes", scores=scores).auroc == 0.0


def test_recovery_is_defined_for_empty_circuits() -> None:
    nothing_found = recovery(nodes(), nodes("m0"), level="nodes")
    assert (nothing_found.precision, nothing_found.recall, nothing_found.f1) == (1, 0, 0)
    assert nothing_found.auroc == 0.5
    nothing_known = recovery(nodes("m0"), nodes(), level="nodes")
    assert (nothing_known.precision, nothing_known.recall) == (0, 1)
    assert np.isnan(nothing_known.auroc)
    assert recovery(nodes(), nodes(), level="nodes").f1 == 1


def test_minimality_tables_are_frames_of_numbers() -> None:
    model = gate_model("or")
    report = evaluate_circuit(model, gate_prompts(), gate_circuit(model), tests=False)
    assert isinstance(report.edges, pd.DataFrame)
    by_name = report.edges.set_index("edge")["effect"]
    assert by_name["m0->logits"] == pytest.approx(-1, abs=0.01)
    assert by_name["a0.h0->m0"] == pytest.approx(0, abs=0.01)  # redundant
