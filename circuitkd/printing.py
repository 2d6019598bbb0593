"""What results look like in a terminal: Rich renderables, made from results and nothing else.

Text that comes from prompts, files or tokenizers is put into ``Text`` objects, which never read it
as markup. Teacher and student always have the same two colours, and every colour is doubled by a
word, so that nothing is lost in a pipe.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd.nodes import Node

if TYPE_CHECKING:
    from circuitkd.compare.alignment import Alignment
    from circuitkd.compare.evidence import Null
    from circuitkd.compare.result import Comparison, Performance

TEACHER, STUDENT = "bright_blue", "dark_orange"

_STRONGEST = 8
_MOST_LISTED = 8
_BAR = 12


def comparison_view(result: "Comparison", *, details: bool = False) -> RenderableType:
    """Performance of both models, the alignment, the paper's number, matches, and what changed.

    ``details`` adds the evidence of every alignment, all matches, and concentration.
    """
    most = len(result.matches) if details else _STRONGEST
    return Group(
        _headline(result),
        "",
        _performance_table(result),
        "",
        _alignment_lines(result),
        "",
        *_matches_lines(result, most),
        "",
        *_restructuring_lines(result),
        "",
        *(_details(result) if details else []),
        Text("In brackets: 95 % intervals over prompts.", "dim"),
    )


def _headline(result: "Comparison") -> Text:
    config, models = result.config, result.performance
    variant = f" ({config['variant']})" if config.get("variant") else ""
    return Text.assemble(
        (models["student"].name, STUDENT),
        " against its teacher ",
        (models["teacher"].name, TEACHER),
        f" on {config['task']}{variant}: {config['n']} prompts, {config['ablation']} ablation",
    )


def _performance_table(result: "Comparison") -> Table:
    teacher = result.performance["teacher"]
    metric = teacher.metric.replace("_", " ")
    unit = "" if teacher.unit == "probability" else f" ({teacher.unit})"
    table = plain_table("", "model", f"{metric}{unit}", "accuracy", "does the task?")
    for side, style in (("teacher", TEACHER), ("student", STUDENT)):
        model = result.performance[side]
        table.add_row(
            Text(side, style),
            Text(model.name, overflow="fold"),
            _interval(model.mean, model.low, model.high),
            _percentages(model),
            Text("yes", "green") if model.competent else Text("not shown", "bold red"),
        )
    return table


def _percentages(model: "Performance") -> str:
    low, high = 100 * model.accuracy_low, 100 * model.accuracy_high
    return f"{100 * model.accuracy:.0f} [{low:.0f}, {high:.0f}] %"


def _alignment_lines(result: "Comparison") -> Table:
    alignment, paper = result.alignment, result.paper_alignment
    value = _interval(alignment.value, alignment.low, alignment.high)
    ours = [
        (
            Text("circuit alignment", "bold"),
            Text(value, "bold"),
            Text("0 unrelated, 1 the same circuit", "dim"),
        ),
        *_evidence_rows(alignment),
    ]
    theirs = [
        (
            Text("paper's formula"),
            Text("–" if paper is None else _interval(paper.value, paper.low, paper.high)),
            Text("for continuity only: high for most pairs", "dim"),
        )
    ]
    grid = Table.grid(padding=(0, 2))
    for row in theirs + ours if result.config["preset"] == "paper" else ours + theirs:
        grid.add_row(*row)
    return grid


def _evidence_rows(alignment: "Alignment") -> list[tuple[Text, Text, Text]]:
    rows = []
    if alignment.calibrated is not None and alignment.floor and alignment.ceiling:
        low, high = alignment.calibrated_interval or (None, None)
        meaning = (
            f"0 a random student ({alignment.floor.value:.2f}), "
            f"1 the teacher itself ({alignment.ceiling.value:.2f})"
        )
        rows.append(("  calibrated", _interval(alignment.calibrated, low, high), meaning))
    if (null := alignment.null) is not None:
        meaning = f"influences shuffled; z {null.z:.1f}, p {_p_value(null.p)}"
        rows.append(("  null", f"{null.mean:.2f} ± {null.sd:.2f}", meaning))
    return [(Text(name), Text(value), Text(meaning, "dim")) for name, value, meaning in rows]


def _p_value(p: float) -> str:
    """A p-value as far as its draws resolve it.

    >>> _p_value(0.0009990009990009992), _p_value(0.0512)
    ('0.001', '0.051')
    """
    return f"{p:.2g}" if p < 0.001 else f"{p:.3f}"


def _details(result: "Comparison") -> list[RenderableType]:
    """Every alignment with its evidence, and how concentrated influence is."""
    table = plain_table("alignment", "value", "null", "z", "p", "floor", "ceiling", "calibrated")
    for name, found in result.alignments.items():
        null, ends = found.null, (found.floor, found.ceiling)
        table.add_row(
            name,
            _interval(found.value, found.low, found.high),
            *(("–",) * 3 if null is None else _null_cells(null)),
            *("–" if end is None else f"{end.value:.2f}" for end in ends),
            "–" if found.calibrated is None else f"{found.calibrated:.2f}",
        )
    spread = plain_table("influence", "components", "effective number", "Gini")
    for row, style in zip(rows_of(result.concentration), (TEACHER, STUDENT), strict=True):
        counts = (str(row["components"]), f"{row['effective']:.1f}", f"{row['gini']:.2f}")
        spread.add_row(Text(row["side"], style), *counts)
    return [Text("evidence", "bold"), table, "", Text("concentration", "bold"), spread, ""]


def _null_cells(null: "Null") -> tuple[str, str, str]:
    return f"{null.mean:.2f} ± {null.sd:.2f}", f"{null.z:.1f}", _p_value(null.p)


def _matches_lines(result: "Comparison", most: int) -> list[RenderableType]:
    threshold = result.restructuring.threshold
    matches = result.matches[result.matches["similarity"] >= threshold]
    table = plain_table("teacher", "student", "similarity", "", "influence")
    table.columns[-1].justify = "right"
    for row in rows_of(matches.head(most)):
        low, high = row.get("similarity_low"), row.get("similarity_high")
        table.add_row(
            Text(f"T {_label(row['teacher'])}", TEACHER),
            Text(f"S {_label(row['student'])}", STUDENT),
            _interval(row["similarity"], low, high),
            Text(_bar(row["similarity"]), "dim"),
            _percent(row["mass"]),
        )
    found = float(matches["mass"].sum())
    title = Text.assemble(
        ("strongest matched pairs", "bold"),
        (f"; {len(matches)} pairs carry {_percent(found)} of the influence", "dim"),
    )
    return [title, table]


def _restructuring_lines(result: "Comparison") -> list[RenderableType]:
    changed = result.restructuring
    merges = [
        Text.assemble(_teachers(row["teachers"]), " → ", _students([row["student"]]))
        for row in rows_of(changed.merges)
    ]
    splits = [
        Text.assemble(_teachers([row["teacher"]]), " → ", _students(row["students"]))
        for row in rows_of(changed.splits)
    ]
    drops = [
        Text.assemble(_teachers([row["teacher"]]), f" {_percent(row['lost'])}")
        for row in rows_of(changed.drops)
    ]
    grid = Table.grid(padding=(0, 2))
    for name, entries in (("merged", merges), ("split", splits), ("dropped", drops)):
        grid.add_row(Text(name, "bold"), _listed(entries))
    meaning = (
        f"dropped: {_percent(changed.lost)} of the teacher's influence has no counterpart in the "
        f"student (similarity under {changed.threshold:.2f})"
    )
    return [grid, Text(meaning, "dim")] if drops else [grid]


def _listed(entries: Sequence[Text]) -> Text:
    if not entries:
        return Text("nothing", "dim")
    text = Text("; ").join(entries[:_MOST_LISTED])
    rest = len(entries) - _MOST_LISTED
    return text if rest <= 0 else Text.assemble(text, (f"; … and {rest} more", "dim"))


def _teachers(names: Iterable[str]) -> Text:
    return Text(", ".join(f"T {_label(name)}" for name in names), TEACHER)


def _students(names: Iterable[str]) -> Text:
    return Text(", ".join(f"S {_label(name)}" for name in names), STUDENT)


def models_view(
    configs: Mapping[str, Mapping[str, Any]], families: Sequence[tuple[str, Sequence[str]]]
) -> RenderableType:
    """The bundled models (name -> its config.json), and how to name others.

    ``families``: name and examples of every supported family.
    """
    table = plain_table("bundled", "layers", "heads", "width", "family")
    for name, config in configs.items():
        table.add_row(
            name, *(str(config[key]) for key in ("n_layer", "n_head", "n_embd", "model_type"))
        )
    ways = Table.grid(padding=(0, 2))
    ways.add_row("a hub id", Text("HuggingFaceTB/SmolLM2-135M, gpt2: fetched once, then cached"))
    ways.add_row("a directory", Text("./my-model: config.json, *.safetensors, tokenizer.json"))
    ways.add_row(
        "in Python",
        Text("circuitkd.load_model(model, tokenizer=tokenizer) takes a Hugging Face model"),
    )
    supported = "; ".join(f"{name} ({', '.join(examples)})" for name, examples in families)
    return Group(
        table if configs else Text("no bundled models", "dim"),
        "",
        Text("Other models, wherever a model is asked for", "bold"),
        ways,
        "",
        Text(f"Supported families: {supported}."),
    )


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, each column -> value."""
    return frame.to_dict(orient="records")  # pyright: ignore[reportReturnType]


def plain_table(*headings: str) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading)
    return table


def _interval(value: float, low: float | None, high: float | None) -> str:
    """A value with its interval, two decimals; the interval only where there is one."""
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _percent(share: float) -> str:
    """A share as people read it; a small one is not called zero.

    >>> _percent(0.123), _percent(1.0), _percent(0.002)
    ('12 %', '100 %', '0.2 %')
    """
    percent = 100 * share
    return f"{percent:.1f} %" if 0 < percent < 0.95 else f"{percent:.0f} %"


def _bar(share: float) -> str:
    full = round(_BAR * min(max(share, 0.0), 1.0))
    return "━" * full + " " * (_BAR - full)


def _label(name: str) -> str:
    return Node.parse(name).label
