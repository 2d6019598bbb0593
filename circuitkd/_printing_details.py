"""What ``circuitkd score --details`` adds, in a terminal. Every table fits into 80 columns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from circuitkd._printing_pieces import (
    STUDENT,
    TEACHER,
    interval_text,
    p_value_text,
    plain_table,
    rows_of,
)
from circuitkd._printing_robustness import behaviour_lines, brittleness_lines

if TYPE_CHECKING:
    from circuitkd.circuits._role_result import HeadRoles
    from circuitkd.compare.evidence import Null
    from circuitkd.compare.result import Comparison
    from circuitkd.compare.swap import SwapTest

_MOST_HEADS = 6


def details_lines(result: "Comparison") -> list[RenderableType]:
    """Evidence and concentration; head roles, swap test and robustness where they were measured."""
    parts = _evidence(result)
    if result.roles is not None:
        parts += _roles(result.roles)
    if result.swaps is not None:
        parts += _swaps(result.swaps)
    if len(result.robustness.conditions) > 1:
        parts += [*behaviour_lines(result.robustness), ""]
    if (pair := result.robustness.brittleness) is not None:
        parts += [*brittleness_lines(pair), ""]
    return parts


def _evidence(result: "Comparison") -> list[RenderableType]:
    """Every alignment with its evidence, and how concentrated influence is."""
    table = plain_table("alignment", "value", "null", "z", "p", "floor,\nceiling", "calibrated")
    for column in table.columns[1:]:
        column.no_wrap = True
    for name, found in result.alignments.items():
        null = found.null
        ends = ["–" if end is None else f"{end.value:.2f}" for end in (found.floor, found.ceiling)]
        table.add_row(
            name,
            interval_text(found.value, found.low, found.high),
            *(("–",) * 3 if null is None else _null_cells(null)),
            ", ".join(ends),
            "–" if found.calibrated is None else f"{found.calibrated:.2f}",
        )
    spread = plain_table("influence", "components", "effective number", "Gini")
    for row, style in zip(rows_of(result.concentration), (TEACHER, STUDENT), strict=True):
        counts = (str(row["components"]), f"{row['effective']:.1f}", f"{row['gini']:.2f}")
        spread.add_row(Text(row["side"], style), *counts)
    return [Text("evidence", "bold"), table, "", Text("concentration", "bold"), spread, ""]


def _null_cells(null: "Null") -> tuple[str, str, str]:
    return f"{null.mean:.2f} ± {null.sd:.2f}", f"{null.z:.1f}", p_value_text(null.p)


def _roles(roles: "Mapping[str, HeadRoles]") -> list[RenderableType]:
    """The heads that hold each role, strongest first, with their scores."""
    table = plain_table("role", "teacher", "student", "uniform head")
    named = list(dict.fromkeys(role for own in roles.values() for role in own.scores))
    for role in named:
        cells = [_holders(roles[side], role) for side in ("teacher", "student")]
        baselines = [own.baselines[role] for own in roles.values() if role in own.baselines]
        table.add_row(role, Text(cells[0], TEACHER), Text(cells[1], STUDENT), f"{baselines[0]:.2f}")
    return [Text("head roles, scores from 0 to 1", "bold"), table, ""]


def _holders(roles: "HeadRoles", role: str) -> str:
    if role not in roles.scores:
        return "–"
    held = [f"{node.label} {score:.2f}" for node, score in roles.holders(role).items()]
    more = [f"{len(held) - _MOST_HEADS} more"] if held[_MOST_HEADS:] else []
    return ", ".join(held[:_MOST_HEADS] + more) or "none"


def _swaps(swaps: "SwapTest") -> list[RenderableType]:
    """What is left of the teacher's metric with the student's component in the place of its own."""
    table = plain_table(
        "teacher", "student", f"ablated costs\n({swaps.unit})", "survives\n(%)", "random\n(%)",
        "beaten", "",
    )  # fmt: skip
    for row, match in zip(rows_of(swaps.frame), swaps.matches, strict=True):
        tested = row["survived"] == row["survived"]
        table.add_row(
            Text(f"T {match[0].label}", TEACHER),
            Text(f"S {match[1].label}", STUDENT),
            interval_text(row["damage"], row["damage_low"], row["damage_high"]),
            _percents(row["survived"], row["survived_low"], row["survived_high"])
            if tested
            else "–",
            f"{100 * row['control_mean']:.0f}" if tested and row["controls"] else "–",
            f"{row['beaten']} of {row['controls']}" if tested else "–",
            Text("verified", "green") if row["verified"] else "",
        )
    return [Text("student components in the place of the teacher's", "bold"), table, ""]


def _percents(value: float, low: float, high: float) -> str:
    return f"{100 * value:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
