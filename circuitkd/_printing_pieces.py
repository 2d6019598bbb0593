"""Pieces that every view is made of: plain tables, values with intervals, shares, names."""

from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from circuitkd.nodes import Node

TEACHER, STUDENT = "bright_blue", "dark_orange"

INTERVALS = Text("In brackets: 95 % intervals over prompts.", "dim")

_BAR = 12


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, each column -> value."""
    return frame.to_dict(orient="records")  # pyright: ignore[reportReturnType]


def plain_table(*headings: str) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading)
    return table


def interval_text(value: float, low: float | None, high: float | None) -> str:
    """A value with its interval, two decimals; the interval only where there is one."""
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def percent_text(share: float) -> str:
    """A share as people read it; a small one is not called zero.

    >>> percent_text(0.123), percent_text(1.0), percent_text(0.002), percent_text(0.0002)
    ('12 %', '100 %', '0.2 %', '<0.1 %')
    """
    percent = 100 * share
    if 0 < percent < 0.05:
        return "<0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 0.95 else f"{percent:.0f} %"


def bar_text(share: float) -> str:
    full = round(_BAR * min(max(share, 0.0), 1.0))
    return "━" * full + " " * (_BAR - full)


def label_of(name: str) -> str:
    return Node.parse(name).label


def p_value_text(p: float) -> str:
    """A p-value as far as its draws resolve it.

    >>> p_value_text(0.0009990009990009992), p_value_text(0.0512)
    ('0.001', '0.051')
    """
    return f"{p:.2g}" if p < 0.001 else f"{p:.3f}"
