"""What a reproduction looks like in a terminal. Every table fits into 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from circuitkd._printing_pieces import plain_table

if TYPE_CHECKING:
    from circuitkd.recorded.reproduction import Compared, Reproduction
    from circuitkd.recorded.schema import Record

_STYLES = {"agrees": "green", "differs": "red", "not reproducible": "yellow"}
_SHORT_UNITS = {"points": "pp", "heads": "", "MLPs": ""}
_READING = (
    "agrees: the recorded number lies within ± of the measured interval (value, where there is "
    "none, or no model was run). %: of the clean logit difference, retained or (drops) lost; pp: "
    "points of it. C: the share of parameters that the student lacks. "
)
_INTERVALS = "In brackets: 95 % intervals, recorded ones over components, measured ones over "


def records_view(records: "Sequence[Record]") -> RenderableType:
    """What can be reproduced, one line each."""
    table = plain_table("name", "what was recorded")
    for record in records:
        table.add_row(Text(record.name, "bold"), Text(record.title))
    hint = Text("circuitkd reproduce NAME measures one of these again.", "dim")
    return Group(table, "", hint)


def reproduction_view(result: "Reproduction") -> RenderableType:
    """Recorded against measured, line by line; then why some numbers cannot be reproduced."""
    reasons = [*dict.fromkeys(line.because for line in result.lines if line.because)]
    counts = Text(", ").join(
        Text(f"{count} {verdict}", _STYLES[verdict]) for verdict, count in result.counts.items()
    )
    parts: list[RenderableType] = [
        Text(result.title, "bold"),
        Text(f"{result.source}\n{_how(result)}", "dim"),
        "",
        _lines_table(result.lines, reasons),
        "",
        counts,
    ]
    parts += [_reason(number, reason) for number, reason in enumerate(reasons, start=1)]
    over = "prompts." if result.config["models"] else "components."
    return Group(*parts, "", Text(_READING + _INTERVALS + over, "dim"))


def _how(result: "Reproduction") -> str:
    config = result.config
    if not config["models"]:
        return "Computed from recorded raw values, if at all; no model was run."
    models = " and ".join(config["models"].values())
    weights = "folded weights" if config["processed"] else "weights as released"
    return (
        f"Measured on {models}: {config['prompts']} prompts (published: "
        f"{config['published_prompts']}), {config['ablation']} ablation, BOS {config['bos']}, "
        f"{weights}"
    )


def _lines_table(lines: "Sequence[Compared]", reasons: Sequence[str]) -> Table:
    """One row a line, side by side of the comparison, each side under its name."""
    table = plain_table("", "recorded", "measured", "±", "")
    table.columns[-1].no_wrap = True
    side, order = "", [*dict.fromkeys(each.side for each in lines)]
    for each in sorted(lines, key=lambda own: order.index(own.side)):
        if each.side != side:
            side = each.side
            table.add_row(Text(side, "bold"))
        line, unit = each.line, _SHORT_UNITS.get(each.line.unit, each.line.unit)
        note = f" ({reasons.index(each.because) + 1})" if each.because else ""
        table.add_row(
            Text(f"  {each.label}"),
            Text(_number(line.recorded, line.low, line.high, unit)),
            Text(_measured(each, unit)),
            "" if line.tolerance is None else f"{line.tolerance:g}",
            Text(each.verdict + note, _STYLES[each.verdict]),
        )
    return table


def _measured(each: "Compared", unit: str) -> str:
    found = each.measured
    return "–" if found.missing else _number(found.value, found.low, found.high, unit)


def _number(value: float, low: float | None, high: float | None, unit: str) -> str:
    digits = 1 if abs(value) >= 20 else 2 if unit else 3
    ends = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{value:.{digits}f}{ends} {unit}".rstrip()


def _reason(number: int, reason: str) -> RenderableType:
    return Padding(Text(f"({number}) not reproducible, because {reason}."), (0, 0, 0, 2))
