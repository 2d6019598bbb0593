"""What influence and circuits look like in a terminal."""

from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd._printing_pieces import plain_table, rows_of
from circuitkd.circuits.edges import Edge
from circuitkd.metrics import accuracy_interval
from circuitkd.nodes import Node

if TYPE_CHECKING:
    from circuitkd.circuits.circuit import Circuit, Score
    from circuitkd.circuits.discovery import Discovery
    from circuitkd.circuits.evaluation import CircuitReport
    from circuitkd.circuits.influence import Influence

_STRONGEST = 8


def influence_view(influence: "Influence", top: int) -> RenderableType:
    """The model's performance, and its ``top`` most influential nodes."""
    low, high = influence.clean_interval
    metric = influence.metric.replace("_", " ")
    sure = accuracy_interval(influence.clean)
    does = "" if influence.competent else "; it does not do this task"
    lines = [
        Text.assemble(
            (influence.model, "bold"),
            f" on {_task(influence.task, influence.variant)}: {len(influence.clean)} prompts, "
            f"{influence.ablation} ablation",
        ),
        Text(
            f"{metric} {float(influence.clean.mean()):.2f} [{low:.2f}, {high:.2f}] "
            f"{influence.unit}, right on {100 * influence.accuracy:.0f} "
            f"[{100 * sure[0]:.0f}, {100 * sure[1]:.0f}] %{does}"
        ),
    ]
    table = plain_table("node", f"effect ({influence.unit})", "", "of the metric", "share")
    for column in table.columns[3:]:
        column.justify = "right"
    frame = influence.frame.sort_values("influence", ascending=False).head(top)
    for row in rows_of(frame):
        drop = row["drop_pct"]
        table.add_row(
            _label(row["node"]),
            f"{row['effect']:+.3f} [{row['effect_low']:+.3f}, {row['effect_high']:+.3f}]",
            Text("helps" if row["effect"] < 0 else "hinders", "dim"),
            "–" if pd.isna(drop) else f"{-drop:+.1f} %",
            f"{100 * row['share']:.1f} %",
        )
    hidden = len(influence.nodes) - len(frame)
    notes = Text(
        "effect = metric with the node ablated minus clean metric; in brackets: 95 % intervals "
        "over prompts." + (f" {hidden} weaker nodes are not shown." if hidden > 0 else ""),
        "dim",
    )
    return Group(*lines, "", table, "", notes)


def circuit_view(found: "Discovery", report: "CircuitReport") -> RenderableType:
    """The circuit, how well it does, and its strongest parts."""
    circuit = found.circuit
    parts: list[RenderableType] = [
        _headline(circuit, report),
        "",
        *_members(circuit),
        "",
        _runs_table(report),
        Text(_searched(circuit), "dim"),
    ]
    if circuit.edges is None and circuit.nodes:
        parts += ["", Text("strongest nodes", "bold"), _scores_table(circuit, circuit.nodes)]
    elif circuit.edges:
        parts += ["", Text("strongest edges", "bold"), _scores_table(circuit, circuit.edges)]
    if found.scores is not None:
        parts += ["", Text(_about_scores(found), "dim")]
    for title, kind, table in (
        ("each node left out", "node", report.nodes),
        ("each edge left out", "edge", report.edges),
    ):
        if len(table):
            parts += ["", Text(title, "bold"), _left_out(table, kind, report.unit)]
    if report.tests is not None:
        parts += ["", *_tests(report)]
    parts += ["", Text("In brackets: 95 % intervals over prompts.", "dim")]
    return Group(*parts)


def _headline(circuit: "Circuit", report: "CircuitReport") -> Text:
    return Text.assemble(
        ("circuit of ", ""),
        (circuit.model, "bold"),
        f" on {_task(circuit.task, circuit.variant)}, by {circuit.method}: {_size(circuit)}; "
        f"{report.ablation} ablation, judged on {len(report.full)} other prompts",
    )


def _size(circuit: "Circuit") -> str:
    nodes = f"{len(circuit)} of {len(circuit.sizes.nodes)} nodes"
    if circuit.edges is None:
        return nodes
    return f"{nodes}, {len(circuit.edges)} of {len(circuit.sizes.edges)} edges"


def _members(circuit: "Circuit") -> list[Text]:
    heads = [node.label for node in circuit.nodes if node.kind == "head"]
    mlps = [str(node.layer) for node in circuit.nodes if node.kind == "mlp"]
    return [
        Text.assemble(("heads ", "bold"), " ".join(heads) or "none"),
        Text.assemble(("MLPs  ", "bold"), " ".join(mlps) or "none"),
    ]


def _runs_table(report: "CircuitReport") -> Table:
    table = plain_table("", f"metric ({report.unit})", "of the full model")
    for row in rows_of(report.frame):
        percent = (
            "–"
            if pd.isna(row["percent"])
            else f"{row['percent']:.0f} [{row['percent_low']:.0f}, {row['percent_high']:.0f}] %"
        )
        value = f"{row['value']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
        style = "bold" if row["run"].startswith("circuit") else ""
        table.add_row(Text(row["run"], style), Text(value, style), Text(percent, style))
    return table


def _searched(circuit: "Circuit") -> str:
    about = circuit.provenance
    return (
        f"on the {about['prompts']} prompts that were searched on the circuit retains "
        f"{about['retained_pct']:.0f} %"
    )


def _scores_table(
    circuit: "Circuit", parts: "Mapping[Node, Score] | Mapping[Edge, Score]"
) -> Table:
    kind = "node" if circuit.edges is None else "edge"
    table = plain_table(kind, f"score ({circuit.unit})")
    scored = [(part.label, score) for part, score in parts.items() if score is not None]
    for label, score in sorted(scored, key=lambda pair: -abs(pair[1]))[:_STRONGEST]:
        table.add_row(label, f"{score:+.3f}")
    return table


def _about_scores(found: "Discovery") -> str:
    from circuitkd.circuits.attribution import EdgeScores

    scores = found.scores
    if not isinstance(scores, EdgeScores):
        return "Scores are exact effects of patching one edge (direct)."
    if scores.verified is None:
        return "Scores are estimates by gradients; --method auto measures the strongest."
    return (
        f"Scores are estimates by gradients, except for the {int(scores.exact.sum())} strongest, "
        "which were measured by path patching; on these the rank correlation of estimate and "
        f"exact effect is {scores.rank_correlation:.2f}."
    )


def _left_out(table: pd.DataFrame, kind: str, unit: str) -> Table:
    shown = plain_table(kind, f"effect ({unit})")
    order = table["effect"].abs().sort_values(ascending=False).index
    for row in rows_of(table.loc[order].head(_STRONGEST)):
        label = Edge.parse(row[kind]).label if kind == "edge" else _label(row[kind])
        shown.add_row(label, f"{row['effect']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]")
    if len(table) > _STRONGEST:
        shown.add_row(Text(f"… and {len(table) - _STRONGEST} more", "dim"), "")
    return shown


def _tests(report: "CircuitReport") -> list[RenderableType]:
    tests = report.tests
    assert tests is not None
    table = plain_table("claim", "p", "")
    for row in rows_of(tests.frame):
        verdict = Text("rejected", "bold red") if row["rejected"] else Text("stands", "green")
        table.add_row(row["null"], f"{row['p']:.3g}", verdict)
    return [Text(f"tests of the circuit's claims at level {tests.alpha:g}", "bold"), table]


def _task(task: str, variant: str | None) -> str:
    return f"{task} ({variant})" if variant else task


def _label(name: str) -> str:
    return Node.parse(name).label
