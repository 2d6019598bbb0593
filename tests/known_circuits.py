"""The known circuits, read from ``tests/data/known_circuits.json``.

Each has a source, and for each way of ablating its edges, their count, and why these. Which edges
matter depends on the ablation: an edge that carries the same on clean and corrupted prompts matters
under zero ablation only. ``wired`` is what the weights connect, whether it matters or not.
"""

import json
from pathlib import Path
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.circuit import Circuit, Sizes

FILE = Path(__file__).parent / "data" / "known_circuits.json"


def known_circuits() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())


def known_circuit(model: TransformerBridge, name: str, ablation: str) -> Circuit:
    """For example ``known_circuit(induction_model(), "induction", "zero")``."""
    edges = known_circuits()[name]["circuits"][ablation]["edges"]
    return Circuit.build(Sizes.of(model), edges=edges)
