"""Does the alignment predict anything? Students of the bundled teacher, and what they do elsewhere.

    python benchmarks/validity.py --out runs/validity        # 25 minutes on one thread
    python benchmarks/validity.py --out runs/toy --quick     # a toy zoo, in seconds

Makes a zoo of students (see ``_zoo.py``), measures each on the task, and asks which number best
ranks them by their *out-of-distribution agreement*: the share of prompts of the task's variants in
which student and teacher choose the same of the answer words, averaged over those variants that
the teacher itself solves better than chance. It is what somebody who puts the student in the
teacher's place would notice, it exists for every student, and it counts shared mistakes as
agreement. The correlation of the two models' logit differences over prompts is a second target:
it still varies where agreement is complete, but can be high for a student that is always wrong.

Printed: for each task Spearman correlations over students, with 95 % bootstrap intervals over
students, over all of them and over those that do the task in distribution; then all students.
``validity.json`` has all rows. Finished students and measurements are kept: run it again to go on.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from _zoo import Recipe, ensure_student, is_made, toy_zoo, zoo
from _zoo_measure import Bench, Row, Settings
from _zoo_report import TARGETS, as_plain_data, correlation_table, student_table

from circuitkd.errors import InputError
from circuitkd.models import load_model
from circuitkd.runs import versions, write_atomically
from circuitkd.tasks import Task, load_task

QUICK = Settings(n=8, n_shifted=16, null_draws=10, random_students=1)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    tasks = {name: load_task(name) for name in options.tasks}
    recipes, settings = (toy_zoo(), QUICK) if options.quick else (zoo(), Settings(n=options.n))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = build(recipes, tasks, settings, options.out, only_finished=options.finished)
    result = {
        "settings": asdict(settings),
        "recipes": [asdict(recipe) | {"name": recipe.name} for recipe in recipes],
        "versions": versions(),
        "rows": {name: frame.to_dict("records") for name, frame in rows.items()},
        "correlations": {name: as_plain_data(frame) for name, frame in rows.items()},
    }
    write_atomically(options.out / "validity.json", (json.dumps(result, indent=1) + "\n").encode())
    text = "\n".join(report(name, frame) for name, frame in rows.items())
    write_atomically(options.out / "validity.md", text.encode())
    print(text)


def build(
    recipes: Sequence[Recipe],
    tasks: Mapping[str, Task],
    settings: Settings,
    out: Path,
    *,
    only_finished: bool = False,
) -> dict[str, pd.DataFrame]:
    """Task -> one row a student. Makes and measures what ``out`` does not hold yet."""
    teacher = load_model("tiny-teacher")
    benches = {name: Bench(task, teacher, settings) for name, task in tasks.items()}
    start = time.monotonic()
    rows: dict[str, list[Row]] = {name: [] for name in tasks}
    for number, recipe in enumerate(recipes, start=1):
        if only_finished and not is_made(recipe, out / "students", tasks):
            continue
        place = ensure_student(recipe, out / "students", tasks)
        for name, bench in benches.items():
            rows[name].append({"student": recipe.name} | _measured(place, bench, only_finished))
        seconds = time.monotonic() - start
        print(f"{number}/{len(recipes)} {recipe.name} ({seconds:.0f} s)", file=sys.stderr)
    found = {name: pd.DataFrame([r for r in own if len(r) > 1]) for name, own in rows.items()}
    if any(frame.empty for frame in found.values()):
        raise InputError("No student is finished yet: run without --finished.")
    return found


def _measured(place: Path, bench: Bench, only_finished: bool) -> Row:
    """The kept measurement of a student, or a new one; empty where none may be made."""
    file = place / f"{bench.task.name}.json"
    settings = asdict(bench.settings)
    if file.is_file():
        kept = json.loads(file.read_text())
        if kept["settings"] == settings:
            return kept["row"]
    if only_finished:
        return {}
    row = bench.measure(load_model(place))
    used = {"settings": settings, "teacher_accuracy_by_variant": bench.teacher_accuracies}
    write_atomically(file, (json.dumps(used | {"row": row}, indent=1) + "\n").encode())
    return row


def report(task: str, rows: pd.DataFrame) -> str:
    """The tables of one task, in Markdown."""
    variants = ", ".join(rows["agreement_by_variant"].iloc[0])
    parts = [f"## {task}\n\n{len(rows)} students; variants that the teacher solves: {variants}.\n"]
    for target, meaning in TARGETS.items():
        parts.append(f"Target: {meaning}\n\n{correlation_table(rows, target)}\n")
    parts.append(f"{student_table(rows)}\n")
    return "\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where students and results go")
    parser.add_argument("--tasks", nargs="+", default=["ioi", "numerals"])
    parser.add_argument("--n", type=int, default=Settings.n, help="prompts of the task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy zoo, to try the machinery")
    parser.add_argument("--finished", action="store_true", help="report what is finished, no more")
    return parser


if __name__ == "__main__":
    main()
