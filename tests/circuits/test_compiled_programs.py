"""Programs compiled by Tracr: their circuits are derived from their weights, and found.

Compiled attention is saturated, and compiled MLPs are staircases: exact methods find everything
that matters, gradients only what values carry on, unless a step falls onto a stair.
"""

import pytest
import torch
from compiled_programs import (
    PROGRAMS,
    compiled_model,
    load_program,
    proportion_prompts,
    reverse_prompts,
    wired_edges,
)
from known_circuits import (
    COMPILED,
    PROPORTION,
    REVERSE,
    Known,
    auroc,
    known_circuit,
    made,
    names,
)

from circuitkd.circuits.attribution import edge_attribution
from circuitkd.circuits.edge_pruning import prune_edges
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.evaluation import evaluate_circuit
from circuitkd.circuits.patching import path_patching
from circuitkd.circuits.pruning import prune_nodes

cases = pytest.mark.parametrize("known", COMPILED, ids=str)


# ---------------------------------------------------------------------- the models themselves


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_converted_model_computes_what_tracr_computed(name: str) -> None:
    """The whole residual stream at the last position, and the output, to 1e-5."""
    program, model = load_program(name), compiled_model(name)
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    for number, example in enumerate(program.about["examples"]):
        logits, cache = model.run_with_cache(torch.tensor([program.ids(example["tokens"])]))
        ours = cache[last][0, -1, : len(program.residual)]
        theirs = program.weights["examples/residual"][number]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        if name == "reverse":
            assert int(logits[0, -1].argmax()) == program.about["tokens"][example["output"]]
        else:
            x, y = (program.about["tokens"][word] for word in "xy")
            share = float(logits[0, -1, x] - logits[0, -1, y])
            assert share == pytest.approx(example["output"], abs=1e-5)


def test_at_the_last_position_the_causal_mask_hides_nothing_from_the_programs() -> None:
    """Tracr's outputs are those of the programs, read there."""
    for example in load_program("reverse").about["examples"]:
        assert example["output"] == example["tokens"][::-1][-1]
    for example in load_program("x_proportion").about["examples"]:
        share = example["tokens"].count("x") / len(example["tokens"])
        assert example["output"] == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_derived_circuits_are_what_the_weights_connect(name: str) -> None:
    model = compiled_model(name)
    wired = {edge.name for edge in known_circuit(model, name, "wired").edge_set}
    assert wired == wired_edges(model)
    for known in COMPILED:
        if known.name == name:
            assert {edge.name for edge in known.circuit(model).edge_set} <= wired


# ---------------------------------------------------------------------- exact methods


@cases
def test_path_patching_finds_exactly_the_edges_that_matter(known: Known) -> None:
    known, model, prompts, circuit = made(known)
    effects = path_patching(model, prompts, ablation=known.ablation).by_edge
    assert auroc(circuit, effects) == 1.0
    assert min(abs(effects[edge]) for edge in circuit.edge_set) > 0.1
    assert max(abs(e) for edge, e in effects.items() if edge not in circuit.edge_set) < 1e-5


@cases
def test_acdc_finds_exactly_the_edges_that_matter(known: Known) -> None:
    known, model, prompts, circuit = made(known)
    found = prune_edges(model, prompts, threshold=0.05, ablation=known.ablation)
    assert found.edge_set == circuit.edge_set


@cases
def test_node_pruning_finds_exactly_the_nodes_that_matter(known: Known) -> None:
    known, model, prompts, circuit = made(known)
    found = prune_nodes(model, prompts, ablation=known.node_ablation)
    assert found.node_set == circuit.node_set


@cases
def test_the_derived_circuit_is_faithful_complete_and_minimal(known: Known) -> None:
    known, model, prompts, circuit = made(known)
    report = evaluate_circuit(model, prompts, circuit, ablation=known.node_ablation, tests=False)
    assert report.faithfulness == pytest.approx(100, abs=0.01)
    assert report.completeness < 0.01
    assert report.edges["effect"].max() < -0.1


def test_wired_edges_that_do_not_matter_do_not() -> None:
    """Equal scores are what the length head computes; BOS is never chosen at the end."""
    model, prompts = compiled_model("reverse"), reverse_prompts("tokens")
    idle = known_circuit(model, "reverse", "wired").edge_set - REVERSE[0].circuit(model).edge_set
    assert {edge.name for edge in idle} == {
        "input->a0.h0<q>",
        "input->a0.h0<k>",
        "input->a3.h0<q>",
    }
    effects = path_patching(model, prompts, edges=idle, ablation="zero").effects
    assert effects.abs().max() < 1e-5


# ---------------------------------------------------------------------- estimates


@pytest.mark.parametrize("known", [REVERSE[1], *PROPORTION[:2]], ids=str)
@pytest.mark.parametrize("method", ["eap", "eap-ig"])
def test_attribution_is_exact_where_only_values_change(known: Known, method: str) -> None:
    known, model, prompts, circuit = made(known)
    scores = edge_attribution(model, prompts, method=method, ablation=known.ablation).by_edge
    exact = path_patching(model, prompts, ablation=known.ablation).by_edge
    assert auroc(circuit, scores) == 1.0
    assert scores == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(
    ("known", "seen"),
    [
        (REVERSE[0], {"a3.h0->logits", "input->a3.h0<v>"}),
        (REVERSE[2], {"a3.h0->logits"}),
        (PROPORTION[2], {"input->m0", "m0->a1.h0<v>", "a1.h0->logits"}),
    ],
    ids=lambda case: str(case) if isinstance(case, Known) else "",  # sets print in any order
)
def test_eap_sees_only_what_values_carry_on(known: Known, seen: set[str]) -> None:
    """Saturated scores and the staircases of MLPs have no slope at the clean prompt."""
    known, model, prompts, circuit = made(known)
    scores = edge_attribution(model, prompts, method="eap", ablation=known.ablation).by_edge
    assert names(scores, 1e-3) == seen
    assert len(seen) < len(circuit.edge_set)


def test_eap_misses_an_mlp_that_is_off_at_the_clean_prompt() -> None:
    """More x in the corrupted prompts: where x is new, the ReLU that sees it has no slope yet."""
    model, prompts = compiled_model("x_proportion"), proportion_prompts(2, 4)
    exact, eap, ig = (
        result.by_edge[Edge.parse("input->m0")]
        for result in (
            path_patching(model, prompts),
            edge_attribution(model, prompts, method="eap"),
            edge_attribution(model, prompts),
        )
    )
    assert exact == pytest.approx(0.4, abs=1e-5)
    assert eap == pytest.approx(0, abs=1e-5)
    assert ig == pytest.approx(exact, abs=1e-5)


def test_eap_ig_finds_zero_ablated_attention_if_nothing_else_is_in_the_way() -> None:
    """Without query or key, BOS is attended to as well: seen close to zero, and underestimated."""
    _, model, prompts, circuit = made(PROPORTION[2])
    scores = edge_attribution(model, prompts, ablation="zero").by_edge
    assert auroc(circuit, scores) == 1.0
    assert -0.02 < scores[Edge.parse("input->a1.h0<q>")] < -0.01  # exactly, -0.13


def test_eap_ig_misses_the_length_under_zero_ablation() -> None:
    """Scaling the embedding scales a staircase's input and its thresholds alike: no step crosses
    a stair, so the head that it reads seems to do nothing, with any number of steps.
    """
    _, model, prompts, circuit = made(REVERSE[0])
    scores = edge_attribution(model, prompts, steps=10, ablation="zero").by_edge
    missed = {"input->a0.h0<v>", "a0.h0->m0"}
    assert max(abs(scores[Edge.parse(name)]) for name in missed) < 1e-5
    assert auroc(circuit, scores) < 1.0


def test_eap_ig_meets_a_narrow_stair_by_luck() -> None:
    """From one length to the next the staircase rises within 2 % of the way, and the attention that
    follows turns within part of that. 10 steps miss it, and so do 40; the last of 24 lands there,
    and stands for far more of the way than it should: the rank is right, the size is not.
    """
    model, prompts = compiled_model("reverse"), reverse_prompts("length", n=1)
    circuit = REVERSE[2].circuit(model)
    missed, met = (edge_attribution(model, prompts, steps=steps).by_edge for steps in (10, 24))
    assert names(missed, 1e-3) == {"a3.h0->logits"}
    assert names(met, 1e-3) == {edge.name for edge in circuit.edge_set}
    assert met[Edge.parse("input->a0.h0<k>")] < -5  # exactly, -1
