"""What robustness looks like in a terminal. Every table fits into 80 columns."""

from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd._printing_pieces import INTERVALS, STUDENT, TEACHER, plain_table, rows_of

if TYPE_CHECKING:
    from circuitkd.compare.robustness import PairedBrittleness, Robustness

_SIDES = (("teacher", TEACHER), ("student", STUDENT))
_NAMES = {
    "mean_drop_pct": "mean drop (%)",
    "total_drop_pct": "total drop (%)",
    "worst_drop_pct": "worst 5 % (%)",
    "severity": "severity (%)",
    "mean_drop": "mean drop",
}
_ENDS = ("prompts_low", "prompts_high")


def robustness_view(result: "Robustness") -> RenderableType:
    """Behaviour under perturbed inputs, and what single ablations cost."""
    parts: list[RenderableType] = [_headline(result), "", *behaviour_lines(result)]
    if result.brittleness is not None:
        parts += ["", *brittleness_lines(result.brittleness)]
    return Group(*parts, "", INTERVALS)


def behaviour_lines(result: "Robustness") -> list[RenderableType]:
    """Accuracy and metric under each condition."""
    return [
        Text("right answers (%)", "bold"),
        _accuracy_table(result),
        "",
        Text(f"{result.metric.replace('_', ' ')} ({result.unit})", "bold"),
        _metric_table(result),
        Text(_meaning(result), "dim"),
    ]


def _headline(result: "Robustness") -> Text:
    config = result.config
    return Text.assemble(
        (config["student"], STUDENT),
        " against its teacher ",
        (config["teacher"], TEACHER),
        f" on {result.task}: {config['n']} prompts each",
    )


def _accuracy_table(result: "Robustness") -> Table:
    table = plain_table("", "teacher", "student", "same answer", "same token")
    for label, left, right, both in _rows(result):
        table.add_row(
            label,
            Text(_percents(left, "accuracy"), TEACHER),
            Text(_percents(right, "accuracy"), STUDENT),
            _percents(both, "agreement"),
            _percents(both, "same_token"),
        )
    return table


def _metric_table(result: "Robustness") -> Table:
    table = plain_table("", "teacher", "student", "S − T, kept (%)")
    for label, left, right, both in _rows(result):
        table.add_row(
            label,
            Text(_numbers(left, "metric"), TEACHER),
            Text(_numbers(right, "metric"), STUDENT),
            _gap(both),
        )
    return table


def _rows(
    result: "Robustness",
) -> list[tuple[Text, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """For each condition: its name, the teacher's row, the student's, and that of both."""
    rows = rows_of(result.frame)
    left, right = ([row for row in rows if row["side"] == side] for side, _ in _SIDES)
    labels = [Text(condition.label) for condition in result.conditions]
    return list(zip(labels, left, right, rows_of(result.agreement), strict=True))


def _gap(row: dict[str, Any]) -> Text:
    value, low, high = row["gap_pct"], row["gap_low"], row["gap_high"]
    if pd.isna(value):
        return Text("–")
    if row["kind"] == "clean":
        return Text("")
    style = "" if low <= 0 <= high else "green" if value > 0 else "red"
    return Text(f"{value:+.0f} [{low:+.0f}, {high:+.0f}]", style)


def _meaning(result: "Robustness") -> str:
    noise = "Noise is in units of the token embeddings' root mean square. "
    other = "The models have different tokens, so likeliest ones are not compared. "
    return (
        (noise if result.config["noise"] else "")
        + ("" if result.tops is not None else other)
        + "Same answer: both right or both wrong. Kept: metric in percent of the clean one."
    )


def brittleness_lines(pair: "PairedBrittleness") -> list[RenderableType]:
    """What single ablations cost."""
    table = plain_table("", "teacher", "student", "difference")
    both = {row["index"]: row for row in rows_of(pair.frame.reset_index())}
    alone = [
        {row["index"]: row for row in rows_of(getattr(pair, side).statistics.reset_index())}
        for side, _ in _SIDES
    ]
    for name, label in _NAMES.items():
        own = [rows[name] for rows in alone]
        if all(pd.isna(row["value"]) for row in own):
            continue
        unit = f" ({pair.teacher.unit})" if name == "mean_drop" else ""
        cells = [
            Text(_statistic(name, row, "value"), style)
            for row, (_, style) in zip(own, _SIDES, strict=True)
        ]
        table.add_row(f"{label}{unit}", *cells, _statistic(name, both[name], "difference", "+"))
    counts = f"{len(pair.teacher.frame)} and {len(pair.student.frame)} heads and MLPs"
    title = Text.assemble(
        ("what ablating one component costs", "bold"),
        (f"; {pair.teacher.ablation} ablation, {counts}", "dim"),
    )
    return [title, table, *_slope(pair), Text(_DROPS, "dim")]


_DROPS = (
    "A drop is what the metric loses, in percent from 0 to 100. With more components the mean "
    "drop falls by itself; the total does not."
)


def _slope(pair: "PairedBrittleness") -> list[RenderableType]:
    per_tenth, low, high = (
        float(pair.slopes.loc["mean_drop_pct", name]) / 10 for name in ("slope", *_ENDS)
    )
    if pair.compression is None or pd.isna(per_tenth):
        return []
    return [
        Text(
            f"The student has {100 * pair.compression:.0f} % fewer parameters: for each tenth the "
            f"mean drop rises by {per_tenth:.2f} [{low:.2f}, {high:.2f}] points."
        )
    ]


def _statistic(name: str, row: dict[str, Any], value: str, sign: str = "") -> str:
    if pd.isna(row[value]):
        return "–"
    scale = 100 if name == "severity" else 1
    digits = {"total_drop_pct": ".0f", "mean_drop": ".2f"}.get(name, ".1f")
    low, high = (f"{scale * row[end]:{sign}{digits}}" for end in _ENDS)
    return f"{scale * row[value]:{sign}{digits}} [{low}, {high}]"


def _percents(row: dict[str, Any], name: str) -> str:
    if pd.isna(row[name]):
        return "–"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{100 * row[name]:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def _numbers(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
