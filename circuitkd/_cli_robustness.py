"""``circuitkd robustness``: check everything cheap, then compute, then print."""

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
from circuitkd._cli_support import ProgressBars, import_libraries, quiet_libraries, results, tell
from circuitkd.errors import InputError
from circuitkd.tasks import Task

if TYPE_CHECKING:
    from circuitkd.compare.robustness import Robustness
    from circuitkd.runs import RunDirectory

NO_ABLATION = "none"


@dataclass(frozen=True)
class RobustnessOptions:
    """The options that the numbers depend on.

    ``variants``: ``None`` for all of the task's. ``noise``: ``None`` for the library's sizes.
    """

    teacher: str
    student: str
    task: str
    n: int
    seed: int
    variants: tuple[str, ...] | None
    noise: tuple[float, ...] | None
    ablation: str
    bos: str
    device: str
    dtype: str

    @property
    def variant(self) -> str | None:
        """The variant that the circuit is looked for in: always the task itself."""
        return None


def run_robustness(
    options: RobustnessOptions,
    *,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    batch_size: int | None,
) -> None:
    """Measure and print; save where ``out`` says."""
    require_one_of("--ablation", options.ablation, (*ABLATIONS, NO_ABLATION))
    task = _checked(options)
    models = {"teacher": options.teacher, "student": options.student}
    with quiet_libraries():
        import_libraries()
        check_device(options.device)
        with (
            at_most(threads),
            run_directory(out, "robustness", options, task, models) as run,
            ProgressBars() as progress,
        ):
            result = _measured(options, task, run, batch_size, progress)
            if run is not None:
                _save(run, result)
    _print(result, as_json)
    if out is not None:
        tell("Saved", f"{out}/", "bold")


def _checked(options: RobustnessOptions) -> Task:
    task = checked_task(options)
    for variant in options.variants or ():
        task.with_variant(variant)
    if any(not 0 < strength < float("inf") for strength in options.noise or ()):
        raise InputError("--noise must be greater than 0 and finite; give it once for each size.")
    return task


def _measured(
    options: RobustnessOptions,
    task: Task,
    run: "RunDirectory | None",
    batch_size: int | None,
    progress: ProgressBars,
) -> "Robustness":
    from circuitkd.compare.robustness import NOISE, robustness

    return robustness(
        options.teacher,
        options.student,
        task,
        n=options.n,
        seed=options.seed,
        variants=options.variants,
        noise=NOISE if options.noise is None else options.noise,
        ablation=None if options.ablation == NO_ABLATION else options.ablation,
        bos=options.bos,
        batch_size=batch_size,
        device=options.device,
        dtype=options.dtype,
        checkpoint=run,
        progress=progress,
    )


def _save(run: "RunDirectory", result: "Robustness") -> None:
    """The result, and its tables for other programs."""
    result.save(run.path)
    run.write_text("behaviour.csv", result.frame.to_csv(index=False))
    run.write_text("agreement.csv", result.agreement.to_csv(index=False))
    if result.brittleness is not None:
        table = result.brittleness.frame.to_csv(index_label="statistic")
        run.write_text("brittleness.csv", table)


def _print(result: "Robustness", as_json: bool) -> None:
    for warning in result.warnings:
        tell("Warning", warning, "bold yellow")
    if as_json:
        json.dump(result.to_json(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        from circuitkd._printing_robustness import robustness_view

        results().print(robustness_view(result))
