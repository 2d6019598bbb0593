"""Circuit files: our own JSON, and the graph JSON of EAP-IG and the MIB benchmark."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from circuitkd.circuits.circuit import Circuit, Score, Sizes
from circuitkd.circuits.edges import Edge
from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.runs import write_atomically

SCHEMA = "circuitkd.circuit/1"

_ABOUT = ("model", "task", "variant", "method", "ablation", "metric", "direction", "provenance")
_GRAPH_SIZES = ("n_layers", "n_heads", "parallel_attn_mlp", "d_model")


# ---------------------------------------------------------------------- our own


def save_circuit(circuit: Circuit, path: str | Path) -> None:
    """Write ``circuit`` as JSON; the file appears whole or not at all."""
    write_json(path, circuit_document(circuit))


def load_circuit(path: str | Path) -> Circuit:
    """Read what ``save_circuit`` wrote."""
    document = read_json(path)
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"{path} is not a circuit of this version (schema {document.get('schema')!r}, "
            f"expected {SCHEMA!r}). Graphs of EAP-IG and MIB are read with read_graph."
        )
    try:
        return circuit_from(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a whole circuit file: {error}.") from error


def circuit_document(circuit: Circuit) -> dict[str, Any]:
    """A circuit as plain data."""
    edges = circuit.edges
    return {
        "schema": SCHEMA,
        "sizes": asdict(circuit.sizes),
        **{key: getattr(circuit, key) for key in _ABOUT},
        "nodes": {node.name: _plain(score) for node, score in circuit.nodes.items()},
        "edges": None if edges is None else {e.name: _plain(s) for e, s in edges.items()},
    }


def circuit_from(document: Mapping[str, Any]) -> Circuit:
    """The circuit that ``circuit_document`` made plain."""
    edges = document["edges"]
    return Circuit(
        sizes=Sizes(**document["sizes"]),
        nodes={Node.parse(name): score for name, score in document["nodes"].items()},
        edges=None if edges is None else {Edge.parse(n): s for n, s in edges.items()},
        **{key: document[key] for key in _ABOUT},
    )


# ---------------------------------------------------------------------- EAP-IG and MIB


@dataclass(frozen=True)
class ScoredGraph:
    """A graph file: the circuit that it marks, and the scores of all its nodes and edges."""

    circuit: Circuit
    node_scores: Mapping[Node, Score]
    edge_scores: Mapping[Edge, Score]


def write_graph(
    circuit: Circuit,
    path: str | Path,
    *,
    edge_scores: Mapping[Edge, Score] | None = None,
    node_scores: Mapping[Node, Score] | None = None,
) -> None:
    """Write the graph JSON of EAP-IG and MIB: every node and edge of the model.

    ``in_graph`` marks the circuit. Scores are the circuit's own, or those given for all parts; an
    edge without one gets 0. These files know no shared keys and values: under grouped-query
    attention an edge into a group is written once for each of its heads, its score split evenly,
    and marked for those heads that are in the circuit.
    """
    sizes = circuit.sizes
    scores = (circuit.edges or {}) if edge_scores is None else edge_scores
    own = circuit.nodes if node_scores is None else node_scores
    cfg: dict[str, Any] = {key: getattr(sizes, key) for key in _GRAPH_SIZES}
    if sizes.n_kv_heads != sizes.n_heads:
        cfg["n_kv_heads"] = sizes.n_kv_heads
    nodes: dict[str, dict[str, Any]] = {}
    for node in (Node("input"), *sizes.nodes, Node("logits")):
        nodes[node.name] = {"in_graph": node in circuit}
        if (score := _plain(own.get(node))) is not None:
            nodes[node.name]["score"] = score
    edges = {}
    for edge in sizes.edges:
        names = _head_names(sizes, edge)
        score = (_plain(scores.get(edge)) or 0.0) / len(names)
        for name in names:
            marked = edge in circuit.edge_set and _reader(name) in circuit
            edges[name] = {"score": score, "in_graph": marked}
    write_json(path, {"cfg": cfg, "nodes": nodes, "edges": edges})


def read_graph(path: str | Path, *, n_kv_heads: int | None = None, **about: Any) -> ScoredGraph:
    """Read the graph JSON of EAP-IG or MIB.

    Args:
        path: the file.
        n_kv_heads: keys and values a layer, where fewer than heads and the file does not say.
            Scores of edges into heads that share a key or value are summed.
        about: what the file does not say: ``model``, ``task``, ``method``, ``metric``, ….

    Raises:
        InputError: no such file, not such a graph, or a node or edge that its sizes do not allow.
    """
    document = read_json(path)
    try:
        cfg, nodes, edges = document["cfg"], document["nodes"], document["edges"]
        sizes = Sizes(
            n_layers=cfg["n_layers"],
            n_heads=cfg["n_heads"],
            n_kv_heads=n_kv_heads or cfg.get("n_kv_heads") or cfg["n_heads"],
            d_model=cfg["d_model"],
            parallel_attn_mlp=cfg["parallel_attn_mlp"],
        )
        node_scores = _node_scores(nodes)
        edge_scores, marked = _edge_scores(sizes, edges)
        listed = [node for node in node_scores if nodes[node.name]["in_graph"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a graph of EAP-IG or MIB ({type(error).__name__}: {error}): it needs "
            "cfg (n_layers, n_heads, parallel_attn_mlp, d_model), nodes and edges."
        ) from error
    sizes.layout.require(edge_scores)
    ends = {n for edge, heads in marked.items() for n in (edge.sender, *heads) if _is_part(n)}
    circuit = Circuit.build(
        sizes,
        nodes={node: node_scores.get(node) for node in {*listed, *ends}},
        edges={edge: edge_scores[edge] for edge in marked} if marked or not listed else None,
        **{"provenance": {"file": Path(path).name}, **about},
    )
    return ScoredGraph(circuit, node_scores, edge_scores)


def _node_scores(nodes: Mapping[str, Mapping[str, Any]]) -> dict[Node, Score]:
    parsed = {Node.parse(name): _plain(about.get("score")) for name, about in nodes.items()}
    return {node: score for node, score in parsed.items() if _is_part(node)}


def _edge_scores(
    sizes: Sizes, edges: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[Edge, Score], dict[Edge, list[Node]]]:
    """All scores; and the marked edges, each with the nodes that it is marked for."""
    own = {name: edge for edge in sizes.edges for name in _head_names(sizes, edge)}
    scores: dict[Edge, Score] = {}
    marked: dict[Edge, list[Node]] = {}
    for name, about in edges.items():
        if name not in own:
            raise InputError(f"{name!r} is not an edge of a model of {sizes}.")
        edge = own[name]
        scores[edge] = (scores.get(edge) or 0.0) + (_plain(about["score"]) or 0.0)
        if about["in_graph"]:
            marked.setdefault(edge, []).append(_reader(name))
    return scores, marked


def _head_names(sizes: Sizes, edge: Edge) -> list[str]:
    """The names of an edge in a file without groups."""
    if not edge.receiver.grouped:
        return [edge.name]
    heads = sizes.receiving(edge.receiver)
    return [f"{edge.sender.name}->{head.name}<{edge.receiver.kind}>" for head in heads]


def _reader(name: str) -> Node:
    """The node at the end of an edge that is called ``name`` in a file."""
    return Node.parse(name.partition("->")[2].partition("<")[0])


def _is_part(node: Node) -> bool:
    return node.kind in ("head", "mlp")


# ---------------------------------------------------------------------- JSON


def _plain(score: Any) -> Score:
    """A score as JSON knows it: NaN and infinities have no place there."""
    return float(score) if score is not None and math.isfinite(score) else None


def write_json(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write plain data; the file appears whole or not at all."""
    write_atomically(Path(path), (json.dumps(document, allow_nan=False) + "\n").encode())


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that holds one object."""
    if not Path(path).is_file():
        raise InputError(f"There is no circuit file at {str(path)!r}.")
    try:
        document = json.loads(Path(path).read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a circuit file.")
    return document
