"""``circuitkd score``: check everything cheap, then compute, then print."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from circuitkd._cli_run import (
    ABLATIONS,
    at_most,
    check_device,
    checked_task,
    require_one_of,
    run_directory,
)
from circuitkd._cli_support import (
    ProgressBars,
    import_libraries,
    quiet_libraries,
    results,
    tell,
)
from circuitkd.errors import InputError
from circuitkd.tasks import Task

if TYPE_CHECKING:
    from circuitkd.compare.comparison import Comparison
    from circuitkd.runs import RunDirectory

PRESETS = ("default", "paper")


@dataclass(frozen=True)
class ScoreOptions:
    """The options that the numbers depend on."""

    teacher: str
    student: str
    task: str
    n: int
    seed: int
    ablation: str
    preset: str
    variant: str | None
    bos: str
    random_students: int
    details: bool
    device: str
    dtype: str


def run_score(
    options: ScoreOptions,
    *,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    batch_size: int | None,
) -> None:
    """Compare and print; save where ``out`` says."""
    require_one_of("--ablation", options.ablation, ABLATIONS)
    require_one_of("--preset", options.preset, PRESETS)
    if options.random_students < 0:
        raise InputError(f"--random-students must be 0 or more, not {options.random_students}.")
    task = checked_task(options)
    models = {"teacher": options.teacher, "student": options.student}
    with quiet_libraries():
        import_libraries()
        check_device(options.device)
        with (
            at_most(threads),
            run_directory(out, "score", options, task, models) as run,
            ProgressBars() as progress,
        ):
            result = _compare(options, task, run, batch_size, progress)
            if run is not None:
                result.save(run.path)
    _print(result, as_json, options.details)
    if out is not None:
        tell("Saved", f"{out}/", "bold")


def _compare(
    options: ScoreOptions,
    task: Task,
    run: "RunDirectory | None",
    batch_size: int | None,
    progress: ProgressBars,
) -> "Comparison":
    from circuitkd.compare.comparison import compare

    return compare(
        options.teacher,
        options.student,
        task,
        n=options.n,
        seed=options.seed,
        ablation=options.ablation,
        preset=options.preset,
        bos=options.bos,
        variant=options.variant,
        random_students=options.random_students,
        details=options.details,
        batch_size=batch_size,
        device=options.device,
        dtype=options.dtype,
        checkpoint=run,
        progress=progress,
    )


def _print(result: "Comparison", as_json: bool, details: bool) -> None:
    for warning in result.warnings:
        tell("Warning", warning, "bold yellow")
    if as_json:
        json.dump(result.to_json(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        from circuitkd.printing import comparison_view

        results().print(comparison_view(result, details=details))
