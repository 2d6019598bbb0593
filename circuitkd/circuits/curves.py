"""Faithfulness over circuit size, and how well scores find a known circuit.

The curve and its two areas are those of MIB (Mueller et al. 2025): CPR, the area under the
faithfulness curve, rewards a method whose strongest parts do the task best; CMD, the area between
the curve and 1, one whose circuits do what the model does, neither less nor more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.integrate import trapezoid
from sklearn.metrics import average_precision_score, roc_auc_score
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.circuit import Circuit, Level, Sizes
from circuitkd.circuits.circuit_runs import CircuitRuns, Part
from circuitkd.circuits.edges import Edge
from circuitkd.errors import InputError, RunError
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

MIB_GRID = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RANKINGS = ("magnitude", "signed")


def cpr(fractions: Sequence[float], faithfulness: Sequence[float]) -> float:
    """Circuit performance ratio: the area under the curve, by trapezoids. Higher is better.

    >>> round(cpr(MIB_GRID, [1.0] * 10), 6), cpr(MIB_GRID, [0.0] * 10)
    (0.999, 0.0)
    """
    return float(trapezoid(faithfulness, fractions))


def cmd(fractions: Sequence[float], faithfulness: Sequence[float]) -> float:
    """Circuit-model distance: the area between the curve and 1. Lower is better; 0 is best.

    >>> cmd(MIB_GRID, [1.0] * 10), round(cmd(MIB_GRID, [0.0] * 10), 6)
    (0.0, 0.999)
    """
    return float(trapezoid(np.abs(1 - np.asarray(faithfulness)), fractions))


@dataclass(frozen=True)
class Curve:
    """Faithfulness over circuit size.

    ``frame`` has one row a size: fraction (asked for), parts (kept, after those without a path
    went), faithfulness. Faithfulness = (circuit - nothing kept) / (full model - nothing kept): 0
    where the circuit does no more than the fully ablated model, 1 where it does what the model
    does. ``ranking`` says which parts came first: CPR and CMD depend on it.
    """

    level: Level
    ablation: str
    ranking: str
    frame: pd.DataFrame

    @property
    def cpr(self) -> float:
        """Area under the curve (see ``cpr``)."""
        return cpr(self.frame["fraction"].tolist(), self.frame["faithfulness"].tolist())

    @property
    def cmd(self) -> float:
        """Area between the curve and 1 (see ``cmd``)."""
        return cmd(self.frame["fraction"].tolist(), self.frame["faithfulness"].tolist())

    def __repr__(self) -> str:
        table = self.frame.to_string(index=False, float_format=lambda value: f"{value:.3f}")
        title = (
            f"Faithfulness over size, {self.level} ranked by {self.ranking}, "
            f"{self.ablation} ablation"
        )
        return f"{title}: CPR {self.cpr:.3f}, CMD {self.cmd:.3f}\n{table}"


def faithfulness_curve(
    model: TransformerBridge,
    prompts: Prompts,
    scores: Mapping[Node, float] | Mapping[Edge, float],
    *,
    grid: Sequence[float] = MIB_GRID,
    ablation: str = "resample",
    ranking: str = "magnitude",
    batch_size: int | None = None,
) -> Curve:
    """Keep the strongest share of all nodes or edges, for each share of ``grid``.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        scores: nodes or edges -> score, negative where the part helps; missing ones count as 0.
        grid: increasing shares of all the model's nodes or edges; each keeps the integer part.
        ablation: ``"resample"`` (MIB), ``"mean"`` or ``"zero"``.
        ranking: what is kept first: the largest abs(score) (``"magnitude"``), or what helps most,
            so that what hinders comes last (``"signed"``).
        batch_size: prompts that go through the model at once.

    Raises:
        InputError: an unknown ranking, nodes and edges mixed, no scores or NaN, parts that the
            model does not have, a grid that does not increase within [0, 1].
        RunError: the fully ablated model does what the full model does.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> influence = ckd.node_influence(student, prompts)
    >>> effects = dict(zip(influence.nodes, influence.frame["effect"]))
    >>> faithfulness_curve(student, prompts, effects, grid=[0.5, 1.0]).frame["parts"].tolist()
    [9, 18]
    """
    if not grid or any(b <= a for a, b in zip((-1, *grid), grid, strict=False)) or grid[-1] > 1:
        raise InputError(f"A grid must increase within 0 and 1; this is {list(grid)}.")
    if ranking not in RANKINGS:
        raise InputError(f"Unknown ranking {ranking!r}: choose one of {', '.join(RANKINGS)}.")
    level = _level(scores)
    runs = CircuitRuns(model, prompts, level, ablation=ablation, batch_size=batch_size)
    if unknown := set(scores) - set(runs.parts):
        raise InputError(f"The model has no {min(str(part) for part in unknown)}.")
    if undefined := [str(part) for part, score in scores.items() if np.isnan(score)]:
        raise InputError(f"The score of {min(undefined)} is NaN: it has no rank.")
    full, nothing = (float(runs.metric(kept).double().mean()) for kept in (runs.parts, ()))
    if abs(full - nothing) < 1e-6:
        raise RunError("Ablating everything changes nothing: there is no faithfulness to measure.")
    by_part: dict[Part, float] = {part: scores.get(part, 0.0) for part in runs.parts}  # pyright: ignore
    first = (lambda score: -abs(score)) if ranking == "magnitude" else float
    ranked = sorted(runs.parts, key=lambda part: first(by_part[part]))
    rows = []
    for fraction in grid:
        kept = _on_paths(runs.sizes, ranked[: int(fraction * len(ranked) + 1e-9)])
        metric = float(runs.metric(kept).double().mean())
        faithfulness = (metric - nothing) / (full - nothing)
        rows.append({"fraction": fraction, "parts": len(kept), "faithfulness": faithfulness})
    return Curve(level, ablation, ranking, pd.DataFrame(rows))


@dataclass(frozen=True)
class Recovery:
    """How well scores, or a circuit, find the parts of a known circuit.

    ``auroc`` and ``average_precision`` rank all the model's parts by abs(score); NaN where the
    known circuit has no part or all of them. ``precision``, ``recall`` and ``f1`` are of the found
    circuit: an empty one has precision 1, and an empty known circuit is recalled fully.
    """

    level: Level
    auroc: float
    average_precision: float
    precision: float
    recall: float
    f1: float

    def __repr__(self) -> str:
        return (
            f"Recovery of the known {self.level}: AUROC {self.auroc:.3f}, average precision "
            f"{self.average_precision:.3f}, precision {self.precision:.3f}, "
            f"recall {self.recall:.3f}, F1 {self.f1:.3f}"
        )


def recovery(
    found: Circuit,
    known: Circuit,
    *,
    level: Level = "edges",
    scores: Mapping[Node, float] | Mapping[Edge, float] | None = None,
) -> Recovery:
    """Compare a circuit with a known one, over edges or nodes.

    Without ``scores`` the parts are ranked by whether ``found`` has them: its AUROC is then the
    mean of the true positive and the true negative rate.

    >>> sizes = Sizes(n_layers=1, n_heads=2, n_kv_heads=2, d_model=8)
    >>> known = Circuit.build(sizes, nodes=["a0.h0"])
    >>> found = Circuit.build(sizes, nodes=["a0.h0", "m0"])
    >>> recovery(found, known, level="nodes")
    Recovery of the known nodes: AUROC 0.750, average precision 0.500, precision 0.500, recall
    1.000, F1 0.667
    """
    found.require_sizes(known.sizes)
    parts: Sequence[Part] = found.sizes.nodes if level == "nodes" else found.sizes.edges
    wanted, got = (c.node_set if level == "nodes" else c.edge_set for c in (known, found))
    truth = np.array([part in wanted for part in parts])
    value = dict.fromkeys(got, 1.0) if scores is None else scores
    ranks = np.array([abs(value.get(part, 0.0)) for part in parts])  # pyright: ignore
    decided = 0 < truth.sum() < len(truth)
    hits = len(wanted & got)
    precision = hits / len(got) if got else 1.0
    recall = hits / len(wanted) if wanted else 1.0
    return Recovery(
        level=level,
        auroc=float(roc_auc_score(truth, ranks)) if decided else np.nan,
        average_precision=float(average_precision_score(truth, ranks)) if decided else np.nan,
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall) if precision + recall else 0.0,
    )


def _level(scores: Iterable[Part]) -> Level:
    kinds = {type(part) for part in scores}
    if kinds not in ({Node}, {Edge}):
        raise InputError("Scores must be of nodes only or of edges only, and there must be some.")
    return "nodes" if kinds == {Node} else "edges"


def _on_paths(sizes: Sizes, kept: Sequence[Part]) -> Sequence[Part]:
    edges = [part for part in kept if isinstance(part, Edge)]
    return list(Circuit.build(sizes, edges=edges).on_paths().edge_set) if edges else kept
