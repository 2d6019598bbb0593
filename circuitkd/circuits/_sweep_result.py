"""``ThresholdSweep``: how the circuit depends on the threshold it was pruned with."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits._shares import percent_of
from circuitkd.circuits.circuit import Circuit


@dataclass(frozen=True)
class ThresholdSweep:
    """The circuits of several thresholds.

    ``frame`` has one row a threshold: threshold, nodes, heads, mlps, edges (missing for node
    circuits), faithfulness_pct (of the full model's metric; with its 95 % interval over prompts
    ``_low`` and ``_high``), jaccard (of the edges, or for node circuits of the nodes, with those of
    ``baseline``; 1 where both are empty).
    """

    baseline: float
    circuits: Mapping[float, Circuit]
    frame: pd.DataFrame

    @classmethod
    def of(
        cls,
        circuits: Mapping[float, Circuit],
        retained: Mapping[float, Float[Tensor, "prompt"]],
        full: Float[Tensor, "prompt"],
        shown: Collection[float],
        baseline: float,
    ) -> "ThresholdSweep":
        """From threshold -> circuit and threshold -> metric of each prompt under that circuit."""
        rows = [
            _row(threshold, circuits[threshold], circuits[baseline], retained[threshold], full)
            for threshold in sorted(shown)
        ]
        return cls(baseline, circuits, pd.DataFrame(rows).dropna(axis="columns", how="all"))

    def __repr__(self) -> str:
        table = self.frame.to_string(index=False, float_format=lambda value: f"{value:.4g}")
        return f"Pruning at {len(self.frame)} thresholds\n{table}"


def _row(
    threshold: float,
    circuit: Circuit,
    baseline: Circuit,
    retained: Float[Tensor, "prompt"],
    full: Float[Tensor, "prompt"],
) -> dict[str, float | int | None]:
    share, low, high = percent_of(retained, full)
    return {
        "threshold": threshold,
        "nodes": len(circuit),
        "heads": sum(node.kind == "head" for node in circuit.nodes),
        "mlps": sum(node.kind == "mlp" for node in circuit.nodes),
        "edges": None if circuit.edges is None else len(circuit.edges),
        "faithfulness_pct": share,
        "faithfulness_low": low,
        "faithfulness_high": high,
        "jaccard": circuit.jaccard(baseline, "nodes" if circuit.edges is None else "edges"),
    }
