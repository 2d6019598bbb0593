"""Circuits: what is in them, set operations, paths, and files."""

import json
from pathlib import Path

import pytest

from circuitkd.circuits._formats import read_graph, write_graph
from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.edges import Edge
from circuitkd.errors import InputError
from circuitkd.nodes import Node

SIZES = Sizes(n_layers=2, n_heads=2, n_kv_heads=2, d_model=8)
GROUPED = Sizes(n_layers=2, n_heads=4, n_kv_heads=2, d_model=8)
GPT2_SMALL = Sizes(n_layers=12, n_heads=12, n_kv_heads=12, d_model=768)
DISTILGPT2 = Sizes(n_layers=6, n_heads=12, n_kv_heads=12, d_model=768)
EMPTY = Circuit.build(SIZES, edges=[])


def edges(*names: str) -> Circuit:
    return Circuit.build(SIZES, edges=names)


def nodes(*names: str) -> Circuit:
    return Circuit.build(SIZES, nodes=names)


def names(parts: object) -> list[str]:
    return sorted(str(part) for part in parts)  # pyright: ignore[reportGeneralTypeIssues]


# ---------------------------------------------------------------------- membership


def test_a_node_circuit_holds_all_edges_between_its_nodes() -> None:
    circuit = nodes("a0.h1", "m1")
    assert names(circuit.edge_set) == [
        "a0.h1->logits",
        "a0.h1->m1",
        "input->a0.h1<k>",
        "input->a0.h1<q>",
        "input->a0.h1<v>",
        "input->logits",
        "input->m1",
        "m1->logits",
    ]
    assert "a0.h1->m1" in circuit
    assert "m0" not in circuit
    assert "input" in circuit


def test_all_nodes_hold_all_edges() -> None:
    assert Circuit.build(SIZES, nodes=SIZES.nodes).edge_set == set(SIZES.edges)


def test_nodes_default_to_the_ends_of_the_edges() -> None:
    assert names(edges("input->a0.h1<k>", "a0.h1->m1", "m1->logits").nodes) == ["a0.h1", "m1"]


def test_nodes_are_in_order_of_computation_whatever_order_they_were_given_in() -> None:
    given = {Node.parse("m1"): 1.0, Node.parse("a0.h0"): -2.0}
    circuit = Circuit(SIZES, given)
    assert list(circuit.nodes.items()) == [(Node.parse("a0.h0"), -2.0), (Node.parse("m1"), 1.0)]


def test_a_shared_key_leads_to_each_head_that_shares_it() -> None:
    circuit = Circuit.build(GROUPED, edges=["input->a0.g1<k>", "a0.h2->logits", "a0.h3->logits"])
    assert names(circuit.nodes) == ["a0.h2", "a0.h3"]
    graph = circuit.to_networkx()
    assert set(graph.successors("input")) == {"a0.h2", "a0.h3"}


@pytest.mark.parametrize("part", ["a5.h0", "m2"])
def test_a_node_that_the_model_lacks_is_refused(part: str) -> None:
    with pytest.raises(InputError, match="no head or MLP"):
        nodes(part)


def test_an_edge_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="no receiver"):
        edges("input->m5")
    with pytest.raises(InputError, match="<layer>"):
        Circuit.build(GROUPED, nodes=["a0.h0"], edges=["input->a0.h0<k>"])


def test_an_edge_needs_its_ends() -> None:
    with pytest.raises(InputError, match=r"a0\.h1->m1 is in the circuit"):
        Circuit.build(SIZES, nodes=["m1"], edges=["a0.h1->m1"])


# ---------------------------------------------------------------------- paths


def test_what_leads_nowhere_goes_to_a_fixed_point() -> None:
    """m1 has no way out, so a0.h0's only edge goes, and then a0.h0's own inputs."""
    circuit = edges(
        "input->a0.h0<q>",
        "a0.h0->m1",
        "input->m0",
        "m0->logits",
        "a1.h0->logits",
        "a0.h1->a1.h0<k>",
    )
    left = circuit.on_paths()
    assert names(left.edge_set) == ["input->m0", "m0->logits"]
    assert names(left.nodes) == ["m0"]
    assert left.on_paths() == left


def test_a_head_is_reached_through_any_of_its_inputs() -> None:
    circuit = edges("input->a0.h0<k>", "a0.h0->logits")
    assert circuit.on_paths() == circuit


def test_a_circuit_without_a_path_is_empty() -> None:
    left = edges("m0->m1", "m1->logits").on_paths()
    assert (len(left.nodes), left.edge_set) == (0, frozenset())
    assert EMPTY.on_paths() == EMPTY


# ---------------------------------------------------------------------- sets


def test_node_circuits_as_sets() -> None:
    one, two = nodes("a0.h0", "m0"), nodes("a0.h0", "a1.h1")
    assert names((one | two).nodes) == ["a0.h0", "a1.h1", "m0"]
    assert names((one & two).nodes) == ["a0.h0"]
    assert names((one - two).nodes) == ["m0"]
    assert one.jaccard(two) == pytest.approx(1 / 3)
    assert (one | two).edges is None


def test_edge_circuits_as_sets() -> None:
    one = edges("input->m0", "m0->logits")
    two = edges("input->m0", "m0->m1", "m1->logits")
    assert names((one | two).edge_set) == ["input->m0", "m0->logits", "m0->m1", "m1->logits"]
    assert names((one & two).edge_set) == ["input->m0"]
    assert names((two - one).edge_set) == ["m0->m1", "m1->logits"]
    assert names((two - one).nodes) == ["m0", "m1"]
    assert one.jaccard(two, "edges") == pytest.approx(1 / 4)
    assert one.jaccard(two) == pytest.approx(1 / 2)


def test_a_node_circuit_meets_an_edge_circuit_as_its_edges() -> None:
    one, two = nodes("m0"), edges("input->m0", "m0->m1", "m1->logits")
    assert names((one & two).edge_set) == ["input->m0"]
    assert names((one - two).edge_set) == ["input->logits", "m0->logits"]
    assert one.jaccard(two, "edges") == pytest.approx(1 / 5)


def test_a_shared_key_stays_in_an_intersection_only_where_a_head_that_reads_it_does() -> None:
    first = Circuit.build(GROUPED, nodes=["a0.h0", "a0.h2"], edges=["input->a0.g0<k>"])
    second = Circuit.build(GROUPED, nodes=["a0.h1", "a0.h2"], edges=["input->a0.g0<k>"])
    assert names((first & second).nodes) == ["a0.h2"]
    assert names((first & second).edge_set) == []
    assert names((first & first).edge_set) == ["input->a0.g0<k>"]


def test_scores_come_from_the_left() -> None:
    one = Circuit.build(SIZES, nodes={"m0": 1.0})
    two = Circuit.build(SIZES, nodes={"m0": 2.0, "m1": 3.0})
    assert list((one | two).nodes.values()) == [1.0, 3.0]
    assert list((one & two).nodes.values()) == [1.0]


def test_empty_circuits_are_alike_and_everything_is_defined_for_them() -> None:
    assert EMPTY.jaccard(EMPTY) == EMPTY.jaccard(EMPTY, "edges") == 1.0
    assert EMPTY.jaccard(nodes("m0")) == 0.0
    assert (EMPTY & nodes("m0")).edge_set == frozenset()
    assert names((EMPTY | nodes("m0")).nodes) == ["m0"]
    assert set(EMPTY.to_networkx()) == {"input", "logits"}
    assert "heads none" in repr(EMPTY)


def test_circuits_of_different_models_do_not_mix() -> None:
    other = Circuit.build(GROUPED, nodes=["m0"])
    for operation in (lambda: other | EMPTY, lambda: other.jaccard(EMPTY)):
        with pytest.raises(InputError, match="different sizes"):
            operation()


# ---------------------------------------------------------------------- networkx


def test_networkx_has_the_scores_and_tells_query_from_key() -> None:
    circuit = Circuit.build(
        SIZES,
        nodes={"a0.h0": -1.5},
        edges={"input->a0.h0<q>": 0.5, "input->a0.h0<k>": 0.25, "a0.h0->logits": -2.0},
    )
    graph = circuit.to_networkx()
    assert graph.nodes["a0.h0"]["score"] == -1.5
    assert graph.nodes["a0.h0"]["label"] == "0.0"
    assert graph.edges["input", "a0.h0", "q"]["score"] == 0.5
    assert graph.edges["input", "a0.h0", "k"]["name"] == "input->a0.h0<k>"
    assert graph.number_of_edges() == 3


# ---------------------------------------------------------------------- files


def scored_circuit() -> Circuit:
    return Circuit.build(
        SIZES,
        nodes={"a0.h0": -1.5, "m1": None},
        edges={"input->a0.h0<q>": 0.5, "a0.h0->m1": 0.25, "m1->logits": -2.0},
        model="toy",
        task="numerals",
        variant="typos",
        method="acdc",
        ablation="corrupted",
        direction="denoising",
        provenance={"threshold": 0.01, "seed": 3},
    )


@pytest.mark.parametrize("circuit", [scored_circuit(), nodes("m0", "a1.h1"), EMPTY])
def test_a_saved_circuit_comes_back_the_same(circuit: Circuit, tmp_path: Path) -> None:
    circuit.save(tmp_path / "circuit.json")
    assert Circuit.load(tmp_path / "circuit.json") == circuit
    assert [path.name for path in tmp_path.iterdir()] == ["circuit.json"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "circuit.json"
    EMPTY.save(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"schema": "circuitkd.circuit/9"}))
    with pytest.raises(InputError, match="not a circuit of this version"):
        Circuit.load(path)
    del document["nodes"]
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="not a whole circuit file"):
        Circuit.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        Circuit.load(path)
    with pytest.raises(InputError, match="no circuit file"):
        Circuit.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("sizes", "n_nodes", "n_edges"), [(GPT2_SMALL, 158, 32_491), (DISTILGPT2, 80, 7_588)]
)
def test_a_full_graph_has_the_nodes_and_edges_of_eap_ig(
    sizes: Sizes, n_nodes: int, n_edges: int, tmp_path: Path
) -> None:
    full = Circuit.build(sizes, nodes=sizes.nodes)
    write_graph(full, tmp_path / "graph.json")
    document = json.loads((tmp_path / "graph.json").read_text())
    assert (len(document["nodes"]), len(document["edges"])) == (n_nodes, n_edges)
    assert document["cfg"] == {
        "n_layers": sizes.n_layers,
        "n_heads": 12,
        "parallel_attn_mlp": False,
        "d_model": 768,
    }
    assert all(edge["in_graph"] for edge in document["edges"].values())
    assert read_graph(tmp_path / "graph.json").circuit.edge_set == full.edge_set


def test_a_graph_written_by_eap_ig_is_read(tmp_path: Path) -> None:
    """One layer, one head, written out by hand."""
    names_in_graph = {
        "input->a0.h0<q>": (0.0, False),
        "input->a0.h0<k>": (0.5, True),
        "input->a0.h0<v>": (-3.0, True),
        "input->m0": (0.125, False),
        "a0.h0->m0": (0.25, False),
        "input->logits": (1.0, False),
        "a0.h0->logits": (-2.0, True),
        "m0->logits": (4.0, False),
    }
    document = {
        "cfg": {"n_layers": 1, "n_heads": 1, "parallel_attn_mlp": False, "d_model": 4},
        "nodes": {name: {"in_graph": name != "m0"} for name in ("input", "a0.h0", "m0", "logits")},
        "edges": {n: {"score": s, "in_graph": i} for n, (s, i) in names_in_graph.items()},
    }
    (tmp_path / "graph.json").write_text(json.dumps(document))
    graph = read_graph(tmp_path / "graph.json", task="ioi", method="eap-ig")
    assert names(graph.circuit.edge_set) == ["a0.h0->logits", "input->a0.h0<k>", "input->a0.h0<v>"]
    assert names(graph.circuit.nodes) == ["a0.h0"]
    assert graph.edge_scores[Edge.parse("m0->logits")] == 4.0
    assert graph.circuit.method == "eap-ig"
    write_graph(graph.circuit, tmp_path / "again.json", edge_scores=graph.edge_scores)
    again = json.loads((tmp_path / "again.json").read_text())
    assert again == document


def test_grouped_keys_are_written_for_each_head_and_read_back_together(tmp_path: Path) -> None:
    circuit = Circuit.build(
        GROUPED,
        nodes={"a1.h0": None, "a1.h1": None, "m0": None},
        edges={"input->m0": 2.0, "m0->a1.g0<k>": 1.0, "a1.h0->logits": -1.0},
    )
    write_graph(circuit, tmp_path / "graph.json")
    written = json.loads((tmp_path / "graph.json").read_text())["edges"]
    assert written["m0->a1.h1<k>"] == {"score": 0.5, "in_graph": True}
    assert not any(".g" in name for name in written)
    assert len(written) == len(Sizes(2, 4, 4, 8).edges)
    assert read_graph(tmp_path / "graph.json").circuit.edges == circuit.edges


def test_only_those_heads_of_a_group_that_are_in_the_circuit_come_back(tmp_path: Path) -> None:
    circuit = Circuit.build(
        GROUPED,
        nodes=["m0", "a1.h1"],
        edges=["input->m0", "m0->a1.g0<k>", "a1.h1->logits"],
    )
    write_graph(circuit, tmp_path / "graph.json")
    written = json.loads((tmp_path / "graph.json").read_text())["edges"]
    assert (written["m0->a1.h0<k>"]["in_graph"], written["m0->a1.h1<k>"]["in_graph"]) == (0, 1)
    again = read_graph(tmp_path / "graph.json").circuit
    assert again.node_set == circuit.node_set
    assert again.edge_set == circuit.edge_set


def test_the_empty_circuit_of_edges_comes_back_from_a_graph_without_an_edge(tmp_path: Path) -> None:
    write_graph(EMPTY, tmp_path / "graph.json")
    assert read_graph(tmp_path / "graph.json").circuit.edge_set == frozenset()


def test_parallel_blocks_have_no_edge_from_a_layers_heads_to_its_mlp() -> None:
    parallel = Sizes(n_layers=1, n_heads=2, n_kv_heads=2, d_model=8, parallel_attn_mlp=True)
    missing = {edge.name for edge in SIZES.edges} & {"a0.h0->m0", "a0.h1->m0"}
    assert missing == {"a0.h0->m0", "a0.h1->m0"}
    assert missing.isdisjoint(edge.name for edge in parallel.edges)
    with pytest.raises(InputError, match="no edge"):
        Circuit.build(parallel, nodes=["a0.h0", "m0"], edges=["a0.h0->m0"])


@pytest.mark.parametrize("text", ["[]", "{}", '{"cfg": {}, "nodes": {}, "edges": {}}'])
def test_what_is_no_graph_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(text)
    with pytest.raises(InputError, match=r"graph|circuit file"):
        read_graph(tmp_path / "graph.json")


def test_a_graph_with_an_unknown_edge_is_refused(tmp_path: Path) -> None:
    write_graph(EMPTY, tmp_path / "graph.json")
    document = json.loads((tmp_path / "graph.json").read_text())
    document["edges"]["m7->logits"] = {"score": 1.0, "in_graph": True}
    (tmp_path / "graph.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="m7->logits"):
        read_graph(tmp_path / "graph.json")
