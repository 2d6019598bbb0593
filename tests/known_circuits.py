"""The known circuits: ``tests/data/known_circuits.json``, and the models that they belong to.

Each has a source, and for each way of ablating its edges, their count, and why these. Which edges
matter depends on the ablation: an edge that carries the same on clean and corrupted prompts matters
under zero ablation only. ``wired`` is what the weights connect, whether it matters or not.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compiled_programs import compiled_model, proportion_prompts, reverse_prompts
from gates import gate_model, gate_prompts
from planted_induction import induction_model, induction_prompts
from planted_ioi import ioi_model, ioi_prompts
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.curves import recovery
from circuitkd.circuits.edges import Edge
from circuitkd.prompts import Prompts

FILE = Path(__file__).parent / "data" / "known_circuits.json"


@dataclass(frozen=True)
class Known:
    """A model whose circuit is known, prompts, and an ablation."""

    name: str
    situation: str
    make_model: Callable[[], TransformerBridge]
    make_prompts: Callable[[], Prompts]

    @property
    def ablation(self) -> str:
        """As ``path_patching`` calls it."""
        return self.situation.split()[0]

    @property
    def node_ablation(self) -> str:
        """As ``evaluate_circuit`` and ``prune_nodes`` call it."""
        return {"corrupted": "resample"}.get(self.ablation, self.ablation)

    def circuit(self, model: TransformerBridge) -> Circuit:
        """The edges that matter to this model on these prompts under this ablation."""
        return known_circuit(model, self.name, self.situation)

    def __str__(self) -> str:
        return f"{self.name}, {self.situation}"


def known_circuits() -> dict[str, dict[str, Any]]:
    """The file as it is."""
    return json.loads(FILE.read_text())


def known_circuit(model: TransformerBridge, name: str, situation: str) -> Circuit:
    """For example ``known_circuit(induction_model(), "induction", "zero")``."""
    edges = known_circuits()[name]["circuits"][situation]["edges"]
    return Circuit.build(Sizes.of(model), edges=edges)


def _cases(
    name: str,
    situations: tuple[str, ...],
    make_model: Callable[[], TransformerBridge],
    make_prompts: Callable[[], Prompts],
) -> tuple[Known, ...]:
    return tuple(Known(name, situation, make_model, make_prompts) for situation in situations)


ABLATIONS = ("corrupted", "mean", "zero")
INDUCTION = _cases("induction", ABLATIONS, induction_model, induction_prompts)
IOI = _cases("planted ioi", ABLATIONS, ioi_model, ioi_prompts)
GATE = _cases("gate", ("corrupted",), partial(gate_model, "and"), gate_prompts)
REVERSE = tuple(
    Known("reverse", situation, partial(compiled_model, "reverse"), partial(reverse_prompts, how))
    for situation, how in (
        ("zero", "tokens"),
        ("corrupted tokens", "tokens"),
        ("corrupted length", "length"),
    )
)
PROPORTION = _cases(
    "x_proportion", ABLATIONS, partial(compiled_model, "x_proportion"), proportion_prompts
)
PLANTED, COMPILED = (*INDUCTION, *IOI), (*REVERSE, *PROPORTION)

Sets = tuple[Known, TransformerBridge, Prompts, Circuit]


def made(known: Known) -> Sets:
    """With its model, prompts and circuit."""
    model = known.make_model()
    return known, model, known.make_prompts(), known.circuit(model)


def auroc(known: Circuit, scores: Mapping[Edge, float]) -> float:
    """How well scores tell the edges of a known circuit from all others; without rounding errors
    of the area, so that a perfect one is 1.
    """
    return round(recovery(known, known, scores=scores).auroc, 12)


def names(scores: Mapping[Edge, float], least: float) -> set[str]:
    """Edges whose score is at least so far from 0."""
    return {edge.name for edge, score in scores.items() if abs(score) >= least}
