"""What a diagnosis looks like in a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from circuitkd._doctor import Diagnosis
from circuitkd._printing_pieces import plain_table

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def diagnosis_view(diagnosis: Diagnosis) -> RenderableType:
    """Every check under its topic, the pairs that fit, and what must be repaired."""
    parts: list[RenderableType] = []
    for topic, checks in diagnosis.topics.items():
        grid = Table.grid(padding=(0, 2))
        for check in checks:
            mark = Text(check.state, _STYLES[check.state])
            grid.add_row(mark, Text(check.about), Text(check.found, overflow="fold"))
        parts += [Text(topic, "bold"), grid, ""]
    table = plain_table("pair from the hub", "memory", "fits")
    for label, needed, fits in diagnosis.pairs:
        table.add_row(Text(label), f"{needed:.1f} GB", Text(fits))
    bundled = "The bundled pair runs here." if not diagnosis.broken else "Repair what is broken."
    return Group(*parts, table, "", Text(bundled, "bold"))
