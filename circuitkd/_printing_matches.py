"""Matched pairs, and what was merged, split and dropped, in a terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd._printing_pieces import (
    STUDENT,
    TEACHER,
    bar_text,
    interval_text,
    label_of,
    percent_text,
    plain_table,
    rows_of,
)

if TYPE_CHECKING:
    from circuitkd.compare.matching import Restructuring

_MOST_LISTED = 8


def matches_lines(matches: pd.DataFrame, most: int, threshold: float) -> list[RenderableType]:
    """The strongest pairs that are alike enough to be matches, with their swap test if any."""
    alike = matches[matches["similarity"] >= threshold]
    tested = "verified" in matches and matches["verified"].notna().any()
    table = plain_table("teacher", "student", "similarity", "", "influence")
    table.columns[-1].justify = "right"
    if tested:
        table.add_column("survives a swap")
    for row in rows_of(alike.head(most)):
        low, high = row.get("similarity_low"), row.get("similarity_high")
        table.add_row(
            Text(f"T {label_of(row['teacher'])}", TEACHER),
            Text(f"S {label_of(row['student'])}", STUDENT),
            interval_text(row["similarity"], low, high),
            Text(bar_text(row["similarity"]), "dim"),
            percent_text(row["mass"]),
            *([_swap_text(row)] if tested else []),
        )
    found = float(alike["mass"].sum())
    title = Text.assemble(
        ("strongest matched pairs", "bold"),
        (f"; {len(alike)} pairs carry {percent_text(found)} of the influence", "dim"),
    )
    return [title, table]


def _swap_text(row: dict[str, Any]) -> Text:
    if pd.isna(row["verified"]):
        return Text("not tested", "dim")
    if pd.isna(row["survived"]):
        return Text("no effect", "dim")
    verified = (", verified", "green") if row["verified"] else ""
    return Text.assemble(f"{100 * row['survived']:.0f} %", verified)


def restructuring_lines(changed: "Restructuring") -> list[RenderableType]:
    """Merges, splits and drops, and what dropped means."""
    merges = [
        Text.assemble(_teachers(row["teachers"]), " → ", _students([row["student"]]))
        for row in rows_of(changed.merges)
    ]
    splits = [
        Text.assemble(_teachers([row["teacher"]]), " → ", _students(row["students"]))
        for row in rows_of(changed.splits)
    ]
    drops = [
        Text.assemble(_teachers([row["teacher"]]), f" {percent_text(row['lost'])}")
        for row in rows_of(changed.drops)
    ]
    grid = Table.grid(padding=(0, 2))
    for name, entries in (("merged", merges), ("split", splits), ("dropped", drops)):
        grid.add_row(Text(name, "bold"), _listed(entries))
    meaning = (
        f"dropped: {percent_text(changed.lost)} of the teacher's influence has no counterpart in "
        f"the student (similarity under {changed.threshold:.2f})"
    )
    return [grid, Text(meaning, "dim")] if drops else [grid]


def _listed(entries: Sequence[Text]) -> Text:
    if not entries:
        return Text("nothing", "dim")
    text = Text("; ").join(entries[:_MOST_LISTED])
    rest = len(entries) - _MOST_LISTED
    return text if rest <= 0 else Text.assemble(text, (f"; … and {rest} more", "dim"))


def _teachers(names: Iterable[str]) -> Text:
    return Text(", ".join(f"T {label_of(name)}" for name in names), TEACHER)


def _students(names: Iterable[str]) -> Text:
    return Text(", ".join(f"S {label_of(name)}" for name in names), STUDENT)
