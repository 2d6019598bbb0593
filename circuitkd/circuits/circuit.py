"""``Circuit``: which nodes and edges of a model do a task, and what each is worth.

A circuit always reaches from the input to the logits; these two are in every circuit and are not
listed. A circuit with ``edges=None`` is a *node circuit*: all edges between its nodes are in it.
The empty circuit is a circuit like any other.

Sign of scores: metric(without it) - metric(with it), so negative means that it helps. How
"without" was done is said by ``ablation`` and ``direction``.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import networkx as nx
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.edges import Edge, Layout, Receiver, layout_of
from circuitkd.errors import InputError
from circuitkd.metrics import UNITS
from circuitkd.nodes import Node, component_nodes

Score = float | None
"""A signed score, or ``None`` where nothing was measured."""
Direction = Literal["noising", "denoising"]
Level = Literal["nodes", "edges"]
LEVELS: tuple[Level, ...] = ("nodes", "edges")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: they decide which nodes and edges it has.

    >>> gpt2_small = Sizes(n_layers=12, n_heads=12, n_kv_heads=12, d_model=768)
    >>> len(gpt2_small.nodes), len(gpt2_small.edges)
    (156, 32491)
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    parallel_attn_mlp: bool = False

    @classmethod
    def of(cls, model: TransformerBridge) -> "Sizes":
        layout = layout_of(model)
        return cls(
            layout.n_layers,
            layout.n_heads,
            layout.n_kv_heads,
            model.cfg.d_model,
            layout.parallel_attn_mlp,
        )

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.n_layers, self.n_heads, self.n_kv_heads, self.parallel_attn_mlp)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All heads and MLPs, in order of computation."""
        return component_nodes(self.n_layers, self.n_heads)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges; where attention and MLP run in parallel, a layer's heads miss its MLP."""
        return self.layout.edges

    def receiving(self, receiver: Receiver) -> tuple[Node, ...]:
        """The nodes that a receiver belongs to: one, or all heads that share a key or value."""
        if receiver.layer is None:
            return (Node("logits"),)
        if receiver.kind == "mlp":
            return (Node.mlp(receiver.layer),)
        heads = self.layout.query_heads(receiver)
        return tuple(Node.attention_head(receiver.layer, h) for h in range(heads.start, heads.stop))


@dataclass(frozen=True)
class Circuit:
    """Part of a model.

    Attributes:
        sizes: the sizes of the model that it is a part of.
        nodes: heads and MLPs -> signed score, or ``None`` where it was not measured.
        edges: edges -> signed score; ``None`` for a node circuit.
        model: name of the model.
        task: name of the task, with its ``variant``.
        method: how it was found.
        ablation: what replaced activations: ``mean``, ``zero``, ``resample`` or ``corrupted``.
        metric: what the scores were measured with.
        direction: ``noising`` (a clean run, parts replaced) or ``denoising`` (the reverse).
        provenance: plain data on how it was made: thresholds, seeds, decisions.

    Raises:
        InputError: nodes or edges that the model does not have; an edge whose end is not in it.

    >>> sizes = Sizes(n_layers=1, n_heads=2, n_kv_heads=2, d_model=8)
    >>> a = Circuit.build(sizes, nodes=["a0.h0", "m0"])
    >>> b = Circuit.build(sizes, nodes=["a0.h0", "a0.h1"])
    >>> [node.name for node in (a & b).nodes], a.jaccard(b)
    (['a0.h0'], 0.3333333333333333)
    """

    sizes: Sizes
    nodes: Mapping[Node, Score]
    edges: Mapping[Edge, Score] | None = None
    model: str = ""
    task: str = ""
    variant: str | None = None
    method: str = ""
    ablation: str = ""
    metric: str = "logit_difference"
    direction: Direction = "noising"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [node.name for node in set(self.nodes) - set(self.sizes.nodes)]:
            raise InputError(f"The model has no head or MLP {', '.join(sorted(unknown))}.")
        ordered = {node: self.nodes[node] for node in self.sizes.nodes if node in self.nodes}
        object.__setattr__(self, "nodes", ordered)
        if self.edges is not None:
            object.__setattr__(self, "edges", self._checked(self.edges))

    def _checked(self, edges: Mapping[Edge, Score]) -> dict[Edge, Score]:
        if unknown := set(edges) - set(self.sizes.edges):
            self.sizes.layout.require(unknown)
            raise InputError(f"The model has no edge {min(edge.name for edge in unknown)}.")
        for edge in edges:
            if not _connects(self.sizes, edge, self.nodes):
                raise InputError(f"{edge.name} is in the circuit, and a node at its end is not.")
        return {edge: edges[edge] for edge in self.sizes.edges if edge in edges}

    # ------------------------------------------------------------------ making

    @classmethod
    def build(
        cls,
        sizes: Sizes,
        *,
        nodes: Iterable[Node | str] | Mapping[Node, Score] | None = None,
        edges: Iterable[Edge | str] | Mapping[Edge, Score] | None = None,
        **about: Any,
    ) -> "Circuit":
        """A circuit of nodes and edges or their names; nodes default to the edges' ends."""
        scored_edges = None if edges is None else _scored(edges, _edge)
        if nodes is not None:
            scored_nodes = _scored(nodes, _node)
        else:
            sizes.layout.require(scored_edges or {})
            ends = {n for edge in scored_edges or {} for n in _ends(sizes, edge)}
            scored_nodes = dict.fromkeys(ends)
        return cls(sizes, scored_nodes, scored_edges, **about)

    @classmethod
    def full(cls, model: TransformerBridge, **about: Any) -> "Circuit":
        """The node circuit of the whole model."""
        sizes = Sizes.of(model)
        return cls(sizes, dict.fromkeys(sizes.nodes), model=str(model.cfg.model_name), **about)

    # ------------------------------------------------------------------ looking

    @property
    def unit(self) -> str:
        """Unit of the scores: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def edge_set(self) -> frozenset[Edge]:
        """The edges; for a node circuit all between its nodes, the input and the logits."""
        if self.edges is not None:
            return frozenset(self.edges)
        return frozenset(e for e in self.sizes.edges if _connects(self.sizes, e, self.nodes))

    @property
    def node_set(self) -> frozenset[Node]:
        """The heads and MLPs."""
        return frozenset(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, part: Node | Edge | str) -> bool:
        if isinstance(part, str):
            part = Edge.parse(part) if "->" in part else Node.parse(part)
        if isinstance(part, Edge):
            return part in self.edge_set
        return part.kind in ("input", "logits") or part in self.nodes

    def to_networkx(self) -> "nx.MultiDiGraph[str]":
        """Nodes by name with ``kind``, ``layer``, ``head``, ``label``, ``score``; edges keyed by
        ``q``, ``k``, ``v``, ``mlp`` or ``logits``, with ``name`` and ``score``.

        An edge into a key or value that several heads share leads to each of them.
        """
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(
            model=self.model, task=self.task, metric=self.metric, direction=self.direction
        )
        for node in (Node("input"), *self.nodes, Node("logits")):
            graph.add_node(
                node.name,
                kind=node.kind,
                layer=node.layer,
                head=node.head,
                label=node.label,
                score=self.nodes.get(node),
            )
        for edge in self.sizes.edges:
            if edge not in self.edge_set:
                continue
            score = None if self.edges is None else self.edges[edge]
            for node in self.sizes.receiving(edge.receiver):
                if node.name in graph:
                    graph.add_edge(
                        edge.sender.name,
                        node.name,
                        key=edge.receiver.kind,
                        name=edge.name,
                        score=score,
                    )
        return graph

    def on_paths(self) -> "Circuit":
        """Only the nodes and edges on a path from the input to the logits.

        A head is reached through its query, its key or its value: one is enough. What is left
        is stable: nothing more goes when this is called again. Every node of a node circuit is on
        a path.
        """
        if self.edges is None:
            return self
        fed = _closure(self.sizes, self.edge_set, backward=False)
        heard = _closure(self.sizes, self.edge_set, backward=True)
        alive = fed & heard
        edges = {
            edge: score
            for edge, score in self.edges.items()
            if edge.sender in alive and any(n in alive for n in self.sizes.receiving(edge.receiver))
        }
        nodes = {node: score for node, score in self.nodes.items() if node in alive}
        return replace(self, nodes=nodes, edges=edges)

    # ------------------------------------------------------------------ sets

    def __or__(self, other: "Circuit") -> "Circuit":
        """What is in either; scores are ours where we have the part."""
        nodes = {**other.nodes, **self.nodes}
        ours, theirs = self._edge_scores(other), other._edge_scores(self)
        edges = None if ours is None or theirs is None else {**theirs, **ours}
        return self._derived("union", other, nodes, edges)

    def __and__(self, other: "Circuit") -> "Circuit":
        """What is in both, with our scores.

        An edge into a key or value that heads share is in it where one of these heads is.
        """
        nodes = {node: score for node, score in self.nodes.items() if node in other.nodes}
        ours, theirs = self._edge_scores(other), other._edge_scores(self)
        edges = (
            None
            if ours is None or theirs is None
            else {
                edge: score
                for edge, score in ours.items()
                if edge in theirs and _connects(self.sizes, edge, nodes)
            }
        )
        return self._derived("intersection", other, nodes, edges)

    def __sub__(self, other: "Circuit") -> "Circuit":
        """What is here and not there; a node also stays as the end of an edge that stays."""
        ours, theirs = self._edge_scores(other), other._edge_scores(self)
        nodes = {node: score for node, score in self.nodes.items() if node not in other.nodes}
        if ours is None or theirs is None:
            return self._derived("difference", other, nodes, None)
        edges = {edge: score for edge, score in ours.items() if edge not in theirs}
        for edge in edges:
            ends = _ends(self.sizes, edge)
            nodes |= {node: self.nodes[node] for node in ends if node in self.nodes}
        return self._derived("difference", other, nodes, edges)

    def jaccard(self, other: "Circuit", over: Level = "nodes") -> float:
        """Shared parts over all parts, in [0, 1]; 1 where both circuits are empty."""
        self.require_sizes(other.sizes)
        if over not in LEVELS:
            raise InputError(f"Circuits are compared over nodes or edges, not {over!r}.")
        ours, theirs = (
            (self.node_set, other.node_set) if over == "nodes" else (self.edge_set, other.edge_set)
        )
        together = len(ours | theirs)
        return len(ours & theirs) / together if together else 1.0

    def _edge_scores(self, other: "Circuit") -> Mapping[Edge, Score] | None:
        """Our edges; written out where only the other circuit lists them."""
        if self.edges is None and other.edges is not None:
            return dict.fromkeys(self.edge_set)
        return self.edges

    def _derived(
        self,
        how: str,
        other: "Circuit",
        nodes: Mapping[Node, Score],
        edges: Mapping[Edge, Score] | None,
    ) -> "Circuit":
        self.require_sizes(other.sizes)
        provenance = {how: [_summary(self), _summary(other)]}
        return replace(self, nodes=nodes, edges=edges, method=how, provenance=provenance)

    def require_sizes(self, sizes: Sizes) -> None:
        """``InputError`` unless it is part of a model of these sizes."""
        if self.sizes != sizes:
            raise InputError(
                f"These are models of different sizes: the circuit is part of one of {self.sizes}, "
                f"the other is {sizes}."
            )

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write one JSON file; it appears whole or not at all."""
        from circuitkd.circuits._formats import save_circuit  # _formats builds circuits

        save_circuit(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Read what ``save`` wrote."""
        from circuitkd.circuits._formats import load_circuit

        return load_circuit(path)

    def __repr__(self) -> str:
        edges = "all edges between them" if self.edges is None else f"{len(self.edges)} edges"
        by = f", by {self.method}" if self.method else ""
        of = f" of {self.model}" if self.model else ""
        lines = [f"Circuit{of} on {self.task or 'no task'}{by}: {len(self)} nodes, {edges}"]
        heads = [node.label for node in self.nodes if node.kind == "head"]
        mlps = [str(node.layer) for node in self.nodes if node.kind == "mlp"]
        lines += [f"  heads {' '.join(heads) or 'none'}", f"  MLPs  {' '.join(mlps) or 'none'}"]
        return "\n".join(lines)


def _summary(circuit: Circuit) -> dict[str, Any]:
    return {key: getattr(circuit, key) for key in ("model", "task", "method")} | {
        "nodes": len(circuit),
        "edges": None if circuit.edges is None else len(circuit.edges),
    }


def _connects(sizes: Sizes, edge: Edge, nodes: Collection[Node]) -> bool:
    """Whether both ends of an edge are among ``nodes``, the input and the logits."""
    return (edge.sender.kind == "input" or edge.sender in nodes) and (
        edge.receiver.kind == "logits"
        or any(node in nodes for node in sizes.receiving(edge.receiver))
    )


def _ends(sizes: Sizes, edge: Edge) -> list[Node]:
    """The heads and MLPs at the two ends of an edge."""
    return [
        node
        for node in (edge.sender, *sizes.receiving(edge.receiver))
        if node.kind in ("head", "mlp")
    ]


def _closure(sizes: Sizes, edges: Iterable[Edge], *, backward: bool) -> set[Node]:
    """All nodes that the input reaches, or that reach the logits."""
    links: nx.DiGraph[Node] = nx.DiGraph()
    links.add_nodes_from([Node("input"), Node("logits")])
    for edge in edges:
        links.add_edges_from((edge.sender, node) for node in sizes.receiving(edge.receiver))
    if backward:
        return {Node("logits"), *nx.ancestors(links, Node("logits"))}
    return {Node("input"), *nx.descendants(links, Node("input"))}


def _node(part: Node | str) -> Node:
    return Node.parse(part) if isinstance(part, str) else part


def _edge(part: Edge | str) -> Edge:
    return Edge.parse(part) if isinstance(part, str) else part


def _scored(parts: Any, parse: Any) -> dict[Any, Score]:
    if isinstance(parts, Mapping):
        return {parse(part): score for part, score in parts.items()}
    return dict.fromkeys(parse(part) for part in parts)
