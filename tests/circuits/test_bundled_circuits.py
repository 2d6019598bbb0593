"""The bundled teacher's circuits: two methods find much the same one, and it does the task."""

import pytest

import circuitkd as ckd

N = 128


@pytest.mark.slow
@pytest.mark.parametrize("task", ["numerals", "ioi"])
def test_pruning_and_eap_ig_agree_on_a_circuit_that_does_the_task(task: str) -> None:
    teacher = ckd.load_model("tiny-teacher")
    both = ckd.load_task(task).sample(teacher, n=2 * N, seed=0)
    searched, judged = both.take(range(N)), both.take(range(N, 2 * N))
    pruned = ckd.prune_nodes(teacher, searched)
    assert 5 < len(pruned) < 30
    assert pruned.provenance["retained_pct"] > 80
    report = ckd.evaluate_circuit(teacher, judged, pruned, minimality=False, tests=False)
    assert report.faithfulness > 70  # greedy search fits its own prompts a little
    assert report.completeness < 20

    weight = dict.fromkeys(pruned.sizes.nodes, 0.0)
    for edge, score in ckd.edge_attribution(teacher, searched, ablation="mean").by_edge.items():
        if edge.sender in weight:
            weight[edge.sender] += abs(score)
    size = len(pruned)
    strongest = set(sorted(weight, key=lambda node: -weight[node])[:size])
    shared = len(strongest & pruned.node_set)
    by_chance = size**2 / len(pruned.sizes.nodes)
    jaccard, chance = (x / (2 * size - x) for x in (shared, by_chance))
    assert jaccard > chance + 0.15, (jaccard, chance)


def test_the_strongest_edges_by_eap_ig_keep_the_task() -> None:
    teacher = ckd.load_model("tiny-teacher")
    prompts = ckd.load_task("numerals").sample(teacher, n=64, seed=0)
    scores = ckd.edge_attribution(teacher, prompts, ablation="mean")
    circuit = ckd.prune_edges(
        teacher, prompts, method="top-k", scores=scores, k=400, ablation="mean"
    )
    assert len(circuit.edges or ()) <= 400 < len(circuit.sizes.edges) / 3
    assert circuit.provenance["retained_pct"] > 80
