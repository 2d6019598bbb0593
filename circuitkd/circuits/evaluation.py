"""``evaluate_circuit``: does the circuit do the task, does the task need it, is all of it needed?

- **faithfulness**: the circuit kept, the rest ablated. High: it does the task.
- **completeness**: the circuit ablated, the rest kept. Low: the task needs it. (Some papers swap
  the two words.)
- **minimality**: each part left out of the circuit alone. An effect near 0: it could go.

All three in the metric's unit and in percent of the full model. Percentages are withheld where the
full model does not do the task.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._report_file import read_report, save_report
from circuitkd.circuits._shares import is_competent, percent_of
from circuitkd.circuits.circuit import Circuit, Level, Sizes
from circuitkd.circuits.circuit_runs import (
    CircuitRuns,
    Part,
    ablation_of,
    level_of,
    parts_at,
    parts_of,
)
from circuitkd.circuits.curves import Curve, Recovery, faithfulness_curve, recovery
from circuitkd.circuits.edges import Edge
from circuitkd.circuits.hypothesis_tests import HypothesisTests, run_tests
from circuitkd.circuits.influence import Progress
from circuitkd.metrics import UNITS, bootstrap_interval, bootstrap_means, percentile_interval
from circuitkd.models import model_label
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

_RUNS = {
    "full model": "full",
    "circuit (faithfulness)": "kept",
    "without the circuit (completeness)": "without",
    "everything ablated": "nothing",
}


@dataclass(frozen=True)
class CircuitReport:
    """What a circuit is worth on a task.

    ``full``, ``kept``, ``without`` and ``nothing`` are the metric of each prompt, in sampling
    order, of the full model, of the circuit alone, of the model without the circuit, and with
    everything ablated. ``node_effects`` and ``edge_effects`` [prompt, part] are
    metric(circuit without the part) - metric(circuit), parts in the circuit's order.
    """

    circuit: Circuit
    model: str
    task: str
    ablation: str
    metric: str
    full: Float[Tensor, "prompt"]
    kept: Float[Tensor, "prompt"]
    without: Float[Tensor, "prompt"]
    nothing: Float[Tensor, "prompt"]
    node_effects: Float[Tensor, "prompt node"]
    edge_effects: Float[Tensor, "prompt edge"]
    tests: HypothesisTests | None = None
    curve: Curve | None = None
    recovery: Recovery | None = None

    @property
    def unit(self) -> str:
        """Unit of the metric: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @property
    def competent(self) -> bool:
        """Whether the full model does the task; if not, all percentages are NaN."""
        return is_competent(self.full)

    @property
    def faithfulness(self) -> float:
        """What the circuit alone retains of the full metric, in percent."""
        return percent_of(self.kept, self.full)[0]

    @property
    def completeness(self) -> float:
        """What is left without the circuit, in percent of the full metric; low is complete."""
        return percent_of(self.without, self.full)[0]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a run: run, value, low, high (in the metric's unit), percent, percent_low,
        percent_high; intervals are 95 % bootstrap intervals over prompts.
        """
        rows = []
        for name, field in _RUNS.items():
            values = getattr(self, field)
            low, high = bootstrap_interval(values.double().numpy())
            percent, percent_low, percent_high = percent_of(values, self.full)
            rows.append(
                {
                    "run": name,
                    "value": float(values.double().mean()),
                    "low": low,
                    "high": high,
                    "percent": percent,
                    "percent_low": percent_low,
                    "percent_high": percent_high,
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """Minimality of the nodes: node, effect, low, high, percent of the full metric."""
        return self._minimality("node", list(self.circuit.nodes), self.node_effects)

    @cached_property
    def edges(self) -> pd.DataFrame:
        """Minimality of the edges, likewise; empty for a node circuit."""
        return self._minimality("edge", list(self.circuit.edges or ()), self.edge_effects)

    def _minimality(
        self, kind: str, parts: Iterable[Node | Edge], effects: Float[Tensor, "prompt part"]
    ) -> pd.DataFrame:
        if effects.shape[1] == 0:
            return pd.DataFrame(columns=[kind, "effect", "low", "high", "percent"])
        values = effects.double().numpy()
        low, high = percentile_interval(bootstrap_means(values, draws=1000))
        full = float(self.full.double().mean()) if self.competent else np.nan
        return pd.DataFrame(
            {
                kind: [part.name for part in parts],
                "effect": values.mean(0),
                "low": low,
                "high": high,
                "percent": 100 * values.mean(0) / full,
            }
        )

    def save(self, path: str | Path) -> None:
        """Write one JSON file, the circuit included; it appears whole or not at all."""
        save_report(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "CircuitReport":
        """Read what ``save`` wrote."""
        return cls(**read_report(path))

    def __repr__(self) -> str:
        edges = "" if self.circuit.edges is None else f", {len(self.circuit.edges)} edges"
        head = (
            f"Circuit of {self.model} on {self.task}: {len(self.circuit)} nodes{edges}; "
            f"{self.ablation} ablation, {len(self.full)} prompts"
        )
        lines = [head, f"  {'':34} {self.unit:>24}   % of full model"]
        lines += [_run_line(row) for row in self.frame.to_dict("records")]
        if not self.competent:
            lines.append("  The full model does not do this task: percentages are withheld.")
        for kind, table in (("node", self.nodes), ("edge", self.edges)):
            lines += _effect_lines(kind, table)
        lines += [repr(part) for part in (self.tests, self.curve, self.recovery) if part]
        return "\n".join(lines)


def evaluate_circuit(
    model: TransformerBridge,
    prompts: Prompts,
    circuit: Circuit,
    *,
    ablation: str | None = None,
    minimality: bool = True,
    tests: bool = True,
    scores: Mapping[Node, float] | Mapping[Edge, float] | None = None,
    known: Circuit | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> CircuitReport:
    """Measure a circuit: faithfulness, completeness, minimality, and tests of its claim.

    A node circuit is evaluated by its nodes: what is outside writes its replacement value. A
    circuit that lists its edges is evaluated by them: what is outside carries its sender's
    replacement value. The empty circuit retains what the fully ablated model does.

    Args:
        model: the circuit's model.
        prompts: from ``task.sample`` with this model; best not those that it was found on.
        circuit: any circuit of the model.
        ablation: what replaces what is not kept: ``"mean"``, ``"resample"`` or ``"zero"``; by
            default what the circuit was found with, and ``"mean"`` where it does not say.
        minimality: leave out each node, and each edge that is listed: one run each.
        tests: the hypothesis tests of Shi et al. (2024): see ``hypothesis_tests``.
        scores: of all the model's nodes or edges, for the curve over circuit size (CPR, CMD).
        known: the true circuit, for AUROC, precision and recall.
        seed: of the tests' draws.
        batch_size: prompts that go through the model at once.
        progress: called as ``progress(stage, done, total)``, in parts.

    Raises:
        InputError: an argument that cannot be used, or a circuit of another model.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> report = evaluate_circuit(student, prompts, Circuit.full(student), minimality=False)
    >>> report.faithfulness
    100.0
    """
    level = level_of(circuit)
    circuit.require_sizes(Sizes.of(model))
    ablation = ablation_of(circuit) if ablation is None else ablation
    # First what refuses wrong arguments, then what takes long.
    found = None if known is None else _recovery(circuit, known, level, scores)
    curve = (
        None
        if scores is None
        else faithfulness_curve(model, prompts, scores, ablation=ablation, batch_size=batch_size)
    )
    runs = CircuitRuns(model, prompts, level, ablation=ablation, batch_size=batch_size)
    parts = parts_of(circuit)
    kept = runs.metric(parts)
    n_parts = len(circuit.nodes) + len(circuit.edges or ())
    report = _counting(progress, n_parts)
    nodes = [parts_at(circuit, node) for node in circuit.nodes] if minimality else []
    edges = [frozenset([edge]) for edge in circuit.edges or ()] if minimality else []
    node_effects = _effects(runs, parts, nodes, kept, report)
    edge_effects = _effects(runs, parts, edges, kept, report)
    measured = _means(
        circuit.nodes if level == "nodes" else circuit.edges or (),
        node_effects if level == "nodes" else edge_effects,
    )
    return CircuitReport(
        circuit=circuit,
        model=model_label(model),
        task=prompts.task,
        ablation=ablation,
        metric=prompts.metric,
        full=runs.full(),
        kept=kept,
        without=runs.without(parts),
        nothing=runs.metric(()),
        node_effects=node_effects,
        edge_effects=edge_effects,
        tests=run_tests(runs, circuit, seed=seed, measured=measured, progress=progress)
        if tests
        else None,
        curve=curve,
        recovery=found,
    )


def _effects(
    runs: CircuitRuns,
    kept: frozenset[Part],
    removals: Sequence[frozenset[Part]],
    own: Float[Tensor, "prompt"],
    report: Callable[[], None],
) -> Float[Tensor, "prompt part"]:
    effects = torch.zeros(len(own), len(removals))
    for column, gone in enumerate(removals):
        report()
        effects[:, column] = runs.metric(kept - gone) - own
    return effects


def _means(parts: Iterable[Part], effects: Float[Tensor, "prompt part"]) -> dict[Part, float]:
    """The mean effect of each part; nothing where minimality was not asked for."""
    return dict(zip(parts, effects.double().mean(0).tolist(), strict=False))


def _recovery(
    circuit: Circuit,
    known: Circuit,
    level: Level,
    scores: Mapping[Node, float] | Mapping[Edge, float] | None,
) -> Recovery:
    if scores:
        level = "nodes" if isinstance(next(iter(scores)), Node) else "edges"
    return recovery(circuit, known, level=level, scores=scores)


def _counting(progress: Progress | None, total: int) -> Callable[[], None]:
    done = count(1)

    def report() -> None:
        if progress is not None:
            progress("Leaving out parts", next(done), total)

    return report


def _run_line(row: Mapping[str, float | str]) -> str:
    line = (
        f"  {row['run']:34} {row['value']:+8.3f} "
        f"{'[{:+.3f}, {:+.3f}]'.format(row['low'], row['high']):>18}"
    )
    if np.isnan(float(row["percent"])):
        return f"{line}   –"
    return f"{line} {row['percent']:7.1f} [{row['percent_low']:.1f}, {row['percent_high']:.1f}]"


def _effect_lines(kind: str, table: pd.DataFrame, most: int = 8) -> list[str]:
    """The strongest and the weakest part of a minimality table."""
    if table.empty:
        return []
    order = table["effect"].abs().sort_values(ascending=False).index
    shown = [str(table.loc[i, kind]) + f" {table.loc[i, 'effect']:+.3f}" for i in order[:most]]
    rest = f", and {len(order) - most} more" if len(order) > most else ""
    weakest = f"; weakest {table.loc[order[-1], kind]} {table.loc[order[-1], 'effect']:+.3f}"
    return [f"  Left out of the circuit, by {kind}: {', '.join(shown)}{rest}{weakest}"]
