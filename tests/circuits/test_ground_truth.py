"""Planted circuits among noise heads: what each method finds, and what it cannot find, and why.

The models come in two strengths. Saturated: every softmax is flat, a small change of a query or key
changes nothing. Soft: it does. Exact methods do not care; gradients do.
"""

from collections.abc import Callable

import pytest
import torch
from gates import gate_circuit, gate_model, gate_prompts
from known_circuits import INDUCTION, IOI, PLANTED, Known, Sets, auroc, made, names
from planted_induction import NOISE as INDUCTION_NOISE
from planted_induction import PLANTED as INDUCTION_ROLES
from planted_induction import SOFT as SOFT_INDUCTION
from planted_induction import induction_model, induction_prompts
from planted_ioi import NOISE as IOI_NOISE
from planted_ioi import PLANTED as IOI_ROLES
from planted_ioi import SOFT as SOFT_IOI
from planted_ioi import ioi_model, ioi_prompts
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.attribution import edge_attribution, node_attribution
from circuitkd.circuits.circuit import Sizes
from circuitkd.circuits.discovery import SCORED, find_circuit
from circuitkd.circuits.edge_pruning import prune_edges
from circuitkd.circuits.evaluation import evaluate_circuit
from circuitkd.circuits.patching import patched_run, path_patching
from circuitkd.circuits.pruning import prune_nodes
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

ROLES = {"induction": INDUCTION_ROLES, "planted ioi": IOI_ROLES}
NOISE = {"induction": INDUCTION_NOISE, "planted ioi": IOI_NOISE}
LEAST, MOST = 0.3, 0.03  # every planted edge has at least that effect, every other at most that


@pytest.fixture(params=PLANTED, ids=str)
def planted(request: pytest.FixtureRequest) -> Sets:
    """Both saturated models, under each ablation."""
    return made(request.param)


@pytest.fixture(params=[k for k in PLANTED if k.situation != "zero"], ids=str)
def soft(request: pytest.FixtureRequest) -> Sets:
    """Both soft models; their edges are those of the saturated ones."""
    model = (
        induction_model(SOFT_INDUCTION)
        if request.param.name == "induction"
        else ioi_model(SOFT_IOI)
    )
    return request.param, model, request.param.make_prompts(), request.param.circuit(model)


def pattern(model: TransformerBridge, group: PromptGroup, node: Node) -> Tensor:
    _, cache = model.run_with_cache(group.clean)
    return cache[f"blocks.{node.layer}.attn.hook_pattern"][:, node.head]


# ---------------------------------------------------------------------- the models themselves


@pytest.mark.parametrize(
    ("known", "least"), [(INDUCTION[0], 0.8), (IOI[0], 0.7)], ids=["induction", "ioi"]
)
def test_the_models_do_their_tasks_on_clean_prompts_only(known: Known, least: float) -> None:
    model, prompts = known.make_model(), known.make_prompts()
    assert patched_run(model, prompts, []).min() > least
    everything = patched_run(model, prompts, Sizes.of(model).edges)
    assert abs(everything.mean()) < 0.1


@pytest.mark.parametrize(
    ("role", "query", "key"),
    [
        ("duplicate token", "S2", "S1"),
        ("S-inhibition", "END", "S2"),
        ("name mover", "END", "IO"),
        ("second name mover", "END", "IO"),
    ],
)
def test_the_heads_of_ioi_attend_as_their_roles_say(role: str, query: str, key: str) -> None:
    model = ioi_model()
    for group in ioi_prompts().groups:
        seen = pattern(model, group, IOI_ROLES[role])
        rows = torch.arange(len(group))
        assert seen[rows, group.positions[query], group.positions[key]].min() > 0.8


def test_the_heads_of_induction_attend_as_their_roles_say() -> None:
    model, (group,) = induction_model(), induction_prompts().groups
    previous = pattern(model, group, INDUCTION_ROLES["previous token"])
    assert previous.diagonal(-1, 1, 2).min() > 0.99
    induction = pattern(model, group, INDUCTION_ROLES["induction"])
    assert induction[torch.arange(len(group)), -1, group.positions["B"]].min() > 0.99


@pytest.mark.parametrize("known", [INDUCTION[0], IOI[0]], ids=["induction", "ioi"])
def test_a_noise_head_changes_as_much_as_a_planted_one(known: Known) -> None:
    """What it writes differs between clean and corrupted prompts, and matters to nothing."""
    model, prompts = known.make_model(), known.make_prompts()

    def change(node: Node) -> float:
        point = f"blocks.{node.layer}.attn.hook_z"
        runs = [
            model.run_with_cache(tokens)[1][point][:, :, node.head]
            for group in prompts.groups
            for tokens in (group.clean, group.corrupted)
        ]
        return sum(float((a - b).norm()) for a, b in zip(runs[::2], runs[1::2], strict=True))

    noise, planted = NOISE[known.name]["changing"], next(iter(ROLES[known.name].values()))
    assert change(noise) == pytest.approx(change(planted), rel=1e-3)


# ---------------------------------------------------------------------- exact methods


def test_path_patching_tells_planted_edges_from_all_others(planted: Sets) -> None:
    known, model, prompts, circuit = planted
    effects = path_patching(model, prompts, ablation=known.ablation).by_edge
    assert auroc(circuit, effects) == 1.0
    assert max(effects[edge] for edge in circuit.edge_set) < -LEAST
    assert max(abs(e) for edge, e in effects.items() if edge not in circuit.edge_set) < MOST


def test_acdc_finds_exactly_the_planted_edges(planted: Sets) -> None:
    known, model, prompts, circuit = planted
    found = prune_edges(model, prompts, threshold=0.1, ablation=known.ablation)
    assert found.edge_set == circuit.edge_set
    assert found.node_set == frozenset(ROLES[known.name].values())


def test_node_pruning_finds_exactly_the_planted_nodes(planted: Sets) -> None:
    known, model, prompts, _ = planted
    found = prune_nodes(model, prompts, ablation=known.node_ablation)
    assert found.node_set == frozenset(ROLES[known.name].values())


def test_the_planted_circuit_is_faithful_complete_and_minimal(planted: Sets) -> None:
    known, model, prompts, circuit = planted
    report = evaluate_circuit(model, prompts, circuit, ablation=known.node_ablation, tests=False)
    assert report.faithfulness == pytest.approx(100, abs=5)
    assert report.completeness < 10
    assert report.edges["effect"].max() < -LEAST


def test_through_mlps_also_counts_the_path_over_an_mlp() -> None:
    """The induction head reaches the logits through the decoder only."""
    model, prompts = induction_model(), induction_prompts()
    edges = ["a1.h2->m1", "a1.h2->logits"]
    direct = path_patching(model, prompts, edges=edges).frame["effect"]
    through = path_patching(model, prompts, edges=edges, mode="through-mlps").frame["effect"]
    assert direct[0] == pytest.approx(-0.97, abs=0.02)
    assert direct[1] == pytest.approx(0, abs=1e-5)
    assert through[1] == pytest.approx(direct[0], abs=1e-4)


# ---------------------------------------------------------------------- estimates


@pytest.mark.parametrize("method", SCORED)
def test_every_method_finds_the_planted_edges_where_attention_is_soft(
    soft: Sets, method: str
) -> None:
    known, model, prompts, circuit = soft
    top = len(circuit.edge_set)
    found = find_circuit(model, prompts, method, top=top, ablation=known.node_ablation)
    assert found.scores is not None
    assert auroc(circuit, found.scores.by_edge) == 1.0
    assert found.circuit.edge_set == circuit.edge_set


@pytest.mark.parametrize("known", [*INDUCTION[:2], *IOI[:2]], ids=str)
def test_eap_sees_no_query_and_no_key_where_attention_is_saturated(known: Known) -> None:
    """The gradient of a flat softmax vanishes: all that is found is what values carry on."""
    known, model, prompts, circuit = made(known)
    scores = edge_attribution(model, prompts, method="eap", ablation=known.ablation).by_edge
    behind = {
        "induction": {"input->a1.h2<v>", "a1.h2->m1", "m1->logits"},
        "planted ioi": {
            f"{end}" for h in ("a2.h0", "a2.h3") for end in (f"input->{h}<v>", f"{h}->logits")
        },
    }
    assert names(scores, 0.05) == behind[known.name]
    assert auroc(circuit, scores) < 0.9


@pytest.mark.parametrize("known", INDUCTION[:2], ids=str)
def test_eap_ig_finds_induction_where_attention_is_saturated(known: Known) -> None:
    """Between clean and corrupted the softmax moves, and some of the steps fall there."""
    known, model, prompts, circuit = made(known)
    result = edge_attribution(model, prompts, steps=20, ablation=known.ablation)
    assert auroc(circuit, result.by_edge) == 1.0


def test_eap_ig_loses_edges_whose_worth_changes_sign_on_the_way() -> None:
    """The name movers' values: where nothing is inhibited yet, they hold the wrong answer twice.

    Replacing them there helps, replacing them near the clean prompt hurts, and the two cancel.
    The integral is what it is: more steps do not help.
    """
    _, model, prompts, circuit = made(IOI[0])
    values = ["input->a2.h0<v>", "input->a2.h3<v>"]
    exact = path_patching(model, prompts, edges=values).frame["effect"]
    assert exact.tolist() == pytest.approx([-0.5, -0.5], abs=0.01)
    scores = edge_attribution(model, prompts, steps=20).by_edge
    assert auroc(circuit, scores) < 1.0
    assert not names(scores, 0.02) & set(values)
    assert names(scores, 0.02) >= {
        edge.name for edge in circuit.edge_set if edge.receiver.layer in (0, 1)
    }


def test_auto_measures_what_eap_ig_underrates() -> None:
    """The name movers' values are not near the top, but among the 50 that are verified."""
    _, model, prompts, circuit = made(IOI[0])
    result = edge_attribution(model, prompts, method="auto", steps=20, top=50)
    assert auroc(circuit, result.by_edge) == 1.0


def test_under_zero_ablation_eap_misses_what_positions_are_for() -> None:
    """The previous-token head attends by position, so sharply that no gradient is left."""
    known, model, prompts, _ = made(INDUCTION[2])
    edges = ["input->a0.h1<q>", "input->a0.h1<k>"]
    exact = path_patching(model, prompts, edges=edges, ablation=known.ablation).frame["effect"]
    assert exact.max() < -0.9
    scores = edge_attribution(model, prompts, method="eap", ablation=known.ablation).by_edge
    assert not names(scores, 1e-4) & set(edges)


def test_attribution_patching_finds_the_planted_nodes_where_attention_is_soft(
    soft: Sets,
) -> None:
    known, model, prompts, _ = soft
    frame = node_attribution(model, prompts, ablation=known.ablation).frame
    roles = {node.name for node in ROLES[known.name].values()}
    strongest = frame["score"].abs().nlargest(len(roles)).index
    assert set(frame.loc[strongest, "node"]) == roles


@pytest.mark.parametrize(
    ("make_model", "make_prompts", "seen"),
    [
        (induction_model, induction_prompts, {"a1.h2", "m1"}),
        (ioi_model, ioi_prompts, {"a2.h0", "a2.h3"}),
    ],
    ids=["induction", "ioi"],
)
def test_attribution_patching_sees_only_the_last_heads_where_attention_is_saturated(
    make_model: Callable[[], TransformerBridge],
    make_prompts: Callable[[], Prompts],
    seen: set[str],
) -> None:
    frame = node_attribution(make_model(), make_prompts()).frame
    assert set(frame.loc[frame["score"].abs() > 0.1, "node"]) == seen


# ---------------------------------------------------------------------- gates, by edges


@pytest.mark.parametrize("method", ["exact", "eap", "eap-ig"])
def test_every_method_finds_the_edges_of_and(method: str) -> None:
    model, prompts = gate_model("and"), gate_prompts()
    scores = (
        path_patching(model, prompts).by_edge
        if method == "exact"
        else edge_attribution(model, prompts, method=method).by_edge
    )
    assert auroc(gate_circuit(model), scores) == 1.0


@pytest.mark.parametrize("method", ["exact", "eap"])
def test_one_edge_at_a_time_both_branches_of_or_are_missed(method: str) -> None:
    """Either branch alone suffices, and near the clean prompt the gate is flat."""
    model, prompts = gate_model("or"), gate_prompts()
    scores = (
        path_patching(model, prompts).by_edge
        if method == "exact"
        else edge_attribution(model, prompts, method="eap").by_edge
    )
    assert names(scores, 0.01) == {"m0->logits"}


def test_eap_ig_finds_both_branches_of_or() -> None:
    """On the way both bits fall together, and below a half of each the gate follows them."""
    model, prompts = gate_model("or"), gate_prompts()
    scores = edge_attribution(model, prompts, steps=20).by_edge
    assert auroc(gate_circuit(model), scores) == 1.0
    for edge in gate_circuit(model).edge_set:
        assert scores[edge] == pytest.approx(-1 if edge.name == "m0->logits" else -0.5, abs=0.02)
