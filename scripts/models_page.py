"""Write docs/models.md: the families of the code's own table, and pairs from the hub.

    python scripts/models_page.py            # write it
    python scripts/models_page.py --check    # exit 1 when it is stale

What is written by hand is in scripts/models_page.md, with {families} and {pairs} where the tables
go.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from circuitkd._pairs import HUB_PAIRS, Pair
from circuitkd.models import FAMILIES, Family

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "scripts" / "models_page.md"
PAGE = ROOT / "docs" / "models.md"
NOTE = "<!-- Made by scripts/models_page.py from scripts/models_page.md; do not edit. -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether it is stale")
    options = parser.parse_args(arguments)
    wanted = page()
    if not options.check:
        PAGE.write_text(wanted)
        return 0
    if PAGE.is_file() and PAGE.read_text() == wanted:
        return 0
    print("docs/models.md is stale: run python scripts/models_page.py", file=sys.stderr)
    return 1


def page() -> str:
    """The whole page."""
    text = TEMPLATE.read_text()
    for name, made in {"families": families(FAMILIES), "pairs": pairs(HUB_PAIRS)}.items():
        text = text.replace("{" + name + "}", made)
    return f"{NOTE}\n\n{text}"


def families(rows: Sequence[Family]) -> str:
    table = ["| family | architectures | for example |", "|---|---|---|"]
    for family in rows:
        classes, examples = map(quoted, (family.architectures, family.examples))
        table.append(f"| {family.name} | {classes} | {examples} |")
    return "\n".join(table)


def pairs(rows: Sequence[Pair]) -> str:
    table = ["| command | parameters, millions | format | weights of both |", "|---|---|---|---|"]
    for pair in rows:
        sizes = f"{pair.teacher_millions} / {pair.student_millions}"
        weights = f"{pair.weight_bytes / 1e9:.1f} GB"
        table.append(f"| `{pair.command}` | {sizes} | {pair.dtype} | {weights} |")
    return "\n".join(table)


def quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
