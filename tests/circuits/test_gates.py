"""AND and OR, set by hand: what each method finds, and what it cannot find."""

import pytest
import torch
from gates import gate_circuit, gate_model, gate_prompts
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import node_influence
from circuitkd.circuits.circuit import Circuit
from circuitkd.circuits.curves import recovery
from circuitkd.circuits.edge_pruning import prune_edges
from circuitkd.circuits.evaluation import evaluate_circuit
from circuitkd.circuits.pruning import prune_nodes
from circuitkd.metrics import logit_difference
from circuitkd.nodes import Node

PROMPTS = gate_prompts()


@pytest.fixture
def and_model() -> TransformerBridge:
    return gate_model("and")


@pytest.fixture
def or_model() -> TransformerBridge:
    return gate_model("or")


def effects(model: TransformerBridge) -> dict[str, float]:
    influence = node_influence(model, PROMPTS)
    return dict(zip(influence.frame["node"], influence.frame["effect"], strict=True))


def names(circuit: Circuit) -> set[str]:
    return {node.name for node in circuit.nodes}


@pytest.mark.parametrize(("gate", "values"), [("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1])])
def test_the_models_compute_their_gates(gate: str, values: list[float]) -> None:
    model = gate_model(gate)
    bits = torch.tensor([[a, b, 2] for a in (0, 1) for b in (0, 1)])
    with torch.no_grad():
        logits = model(bits)[:, -1]
    answers = torch.full((4,), 3), torch.full((4,), 4)
    torch.testing.assert_close(
        logit_difference(logits, *answers), torch.tensor(values).float(), atol=2e-3, rtol=0
    )


def test_single_node_influence_finds_both_heads_of_and(and_model: TransformerBridge) -> None:
    found = effects(and_model)
    assert found["a0.h0"] == pytest.approx(-1, abs=0.01)
    assert found["a0.h1"] == pytest.approx(-1, abs=0.01)
    assert found["a0.h2"] == pytest.approx(0, abs=0.01)


def test_single_node_influence_misses_both_heads_of_or(or_model: TransformerBridge) -> None:
    found = effects(or_model)
    assert found["m0"] == pytest.approx(-1, abs=0.01)
    for head in ("a0.h0", "a0.h1", "a0.h2", "a0.h3"):
        assert found[head] == pytest.approx(0, abs=0.01)


def test_pruning_keeps_both_heads_of_and(and_model: TransformerBridge) -> None:
    assert names(prune_nodes(and_model, PROMPTS)) == {"a0.h0", "a0.h1", "m0"}


def test_pruning_keeps_one_head_of_or_and_knows_its_worth(or_model: TransformerBridge) -> None:
    """One of the two is enough; once the other has gone, it cannot be missed any more."""
    circuit = prune_nodes(or_model, PROMPTS)
    assert names(circuit) == {"a0.h1", "m0"}
    assert circuit.nodes[Node.parse("a0.h1")] == pytest.approx(-1, abs=0.01)
    other = sorted(node_influence(or_model, PROMPTS).nodes, key=str, reverse=True)
    reordered = prune_nodes(or_model, PROMPTS, order=other)
    assert names(reordered) == {"a0.h0", "m0"}


def test_acdc_finds_exactly_the_edges_of_and(and_model: TransformerBridge) -> None:
    known = gate_circuit(and_model)
    found = prune_edges(and_model, PROMPTS, threshold=0.1)
    assert found.edge_set == known.edge_set
    assert recovery(found, known).auroc == 1.0


def test_acdc_finds_one_branch_of_or(or_model: TransformerBridge) -> None:
    """Greedy removal takes the branch it meets first: precision 1, and 3 of 5 edges."""
    found = recovery(prune_edges(or_model, PROMPTS, threshold=0.1), gate_circuit(or_model))
    assert found.precision == 1.0
    assert found.recall == pytest.approx(3 / 5)


def test_completeness_tells_a_branch_of_or_from_both(or_model: TransformerBridge) -> None:
    """One branch is faithful, but the gate works without it; without both it does not."""
    both = Circuit.build(gate_circuit(or_model).sizes, nodes=["a0.h0", "a0.h1"])
    one = Circuit.build(both.sizes, nodes=["a0.h0"])
    assert evaluate_circuit(or_model, PROMPTS, one).completeness == pytest.approx(100, abs=1)
    assert evaluate_circuit(or_model, PROMPTS, both).completeness == pytest.approx(0, abs=1)
    whole = Circuit.build(both.sizes, nodes=["a0.h0", "m0"])
    assert evaluate_circuit(or_model, PROMPTS, whole).faithfulness == pytest.approx(100, abs=1)


@pytest.mark.parametrize("ablation", ["mean", "resample", "zero"])
def test_the_known_circuit_of_and_is_faithful_complete_and_minimal(
    and_model: TransformerBridge, ablation: str
) -> None:
    # Zero ablation also takes the layer norms' constant and the queries' place away.
    known = gate_circuit(and_model)
    circuit = Circuit.build(known.sizes, nodes=known.nodes) if ablation == "zero" else known
    report = evaluate_circuit(and_model, PROMPTS, circuit, ablation=ablation)
    assert report.faithfulness == pytest.approx(100, abs=1)
    assert report.completeness == pytest.approx(0, abs=1)
    assert report.nodes["effect"].tolist() == pytest.approx([-1, -1, -1], abs=0.01)
    if circuit.edges is not None:
        assert report.edges["effect"].tolist() == pytest.approx([-1] * 5, abs=0.01)
