"""A model run as a circuit, without one, and with parts of it: what every evaluation is made of."""

from collections.abc import Iterable

from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._patched import EdgePatcher
from circuitkd.circuits.ablated import NodeAblator
from circuitkd.circuits.circuit import Circuit, Level, Sizes
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.influence import ABLATIONS
from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

Part = Node | Edge

_CARRIED = {"resample": "corrupted"}  # what edges call an ablation by its paired prompt


def ablation_of(circuit: Circuit) -> str:
    """The ablation that a circuit was found with, in the words for nodes; ``mean`` if unsaid."""
    words = {carried: word for word, carried in _CARRIED.items()}
    return words.get(circuit.ablation, circuit.ablation) or "mean"


class CircuitRuns:
    """Runs of one model in which some parts are kept and all others ablated.

    ``level="nodes"``: parts are heads and MLPs; an ablated one writes its replacement value.
    ``level="edges"``: parts are edges; an ablated one carries its sender's replacement value.
    Replacement values are those of ``ablation``: ``mean``, ``resample`` or ``zero``.
    """

    def __init__(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        level: Level,
        *,
        ablation: str = "mean",
        batch_size: int | None = None,
    ) -> None:
        if ablation not in ABLATIONS:
            raise InputError(
                f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}."
            )
        self.sizes, self.level = Sizes.of(model), level
        self.parts: tuple[Part, ...]
        if level == "nodes":
            self.parts = self.sizes.nodes
            self._nodes = NodeAblator(model, prompts, ablation=ablation, batch_size=batch_size)
        else:
            self.parts = self.sizes.edges
            self._edges = EdgePatcher(
                model, prompts, ablation=_CARRIED.get(ablation, ablation), batch_size=batch_size
            )
            layout = self.sizes.layout
            rows = {receiver: row for row, receiver in enumerate(layout.receivers)}
            self._places: dict[Part, tuple[int, int]] = {
                edge: (rows[edge.receiver], layout.position(edge.sender))
                for edge in self.sizes.edges
            }
            self._all = self._edges.mask(self.sizes.edges)

    def metric(self, kept: Iterable[Part]) -> Float[Tensor, "prompt"]:
        """The metric of each prompt, in sampling order, with all parts but ``kept`` ablated."""
        if self.level == "nodes":
            return self._nodes.metric(part for part in kept if isinstance(part, Node))
        mask = self._all.clone()
        for part in kept:
            mask[self._places[part]] = False
        return self._edges.metric(mask)

    def full(self) -> Float[Tensor, "prompt"]:
        """The metric of the whole model."""
        return self.metric(self.parts)

    def without(self, gone: Iterable[Part]) -> Float[Tensor, "prompt"]:
        """The metric with ``gone`` ablated and everything else kept."""
        gone = set(gone)
        return self.metric(part for part in self.parts if part not in gone)


def parts_of(circuit: Circuit) -> frozenset[Part]:
    """The parts that a circuit is evaluated by: its edges where it has them, else its nodes."""
    return frozenset(circuit.nodes if circuit.edges is None else circuit.edges)


def level_of(circuit: Circuit) -> Level:
    """``edges`` where a circuit lists them, else ``nodes``."""
    return "nodes" if circuit.edges is None else "edges"


def parts_at(circuit: Circuit, node: Node) -> frozenset[Part]:
    """What goes with a node: itself, or all edges of an edge circuit that leave it or lead to it.

    An edge into a key or value that several heads share stays for the others.
    """
    if circuit.edges is None:
        return frozenset([node])
    return frozenset(
        edge
        for edge in circuit.edges
        if edge.sender == node
        or {n for n in circuit.sizes.receiving(edge.receiver) if n in circuit.nodes or n == node}
        == {node}
    )
