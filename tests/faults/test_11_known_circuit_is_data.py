"""The reference circuit itself lacked edges (ACDC, pull request 34).

Known circuits are data with a source and a count, and both halves of the claim are measured: with
nothing but its edges the model does the whole task, and without any one of them it does not.
"""

from pathlib import Path

import pytest
from gates import gate_circuit, gate_model
from known_circuits import COMPILED, GATE, PLANTED, Known, known_circuits

from circuitkd.circuits.circuit import Sizes
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.patching import EdgePatcher

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = [*PLANTED, *GATE, *COMPILED]
ENTRIES = [
    (name, situation) for name, entry in known_circuits().items() for situation in entry["circuits"]
]


def test_every_model_has_a_source() -> None:
    for entry in known_circuits().values():
        assert len(entry["source"]) > 10
        assert (ROOT / entry["model"]).is_file()


@pytest.mark.parametrize(("name", "situation"), ENTRIES)
def test_every_circuit_has_as_many_edges_as_it_says_and_a_reason(name: str, situation: str) -> None:
    circuit = known_circuits()[name]["circuits"][situation]
    assert circuit["count"] == len(circuit["edges"]) == len(set(circuit["edges"]))
    assert circuit["why"].endswith(".")


def test_every_circuit_is_measured() -> None:
    measured = {(known.name, known.situation) for known in CASES}
    assert {entry for entry in ENTRIES if entry[1] != "wired"} == measured


@pytest.mark.parametrize("known", CASES, ids=str)
def test_no_edge_is_lacking_and_none_is_too_many(known: Known) -> None:
    model, prompts = known.make_model(), known.make_prompts()
    circuit = known.circuit(model)
    assert circuit.on_paths().edge_set == circuit.edge_set
    others = frozenset(Sizes.of(model).edges) - circuit.edge_set

    runs = EdgePatcher(model, prompts, ablation=known.ablation)
    full = float(runs.metric([]).mean())

    def left(patched: frozenset[Edge]) -> float:
        return float(runs.metric(patched).mean()) / full

    assert left(others) == pytest.approx(1, abs=0.05)
    for edge in circuit.edge_set:
        assert left(others | {edge}) < 0.9, edge.name


def test_the_gates_circuit_in_code_is_the_one_in_the_data() -> None:
    model = gate_model("or")
    assert gate_circuit(model).edge_set == GATE[0].circuit(model).edge_set
