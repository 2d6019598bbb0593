"""``circuitkd match``: check everything cheap, then compute, then print."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuitkd._cli_run import (
    ABLATIONS,
    at_most,
    check_device,
    checked_task,
    require_one_of,
    run_directory,
)
from circuitkd._cli_support import ProgressBars, import_libraries, quiet_libraries, results, tell
from circuitkd.tasks import Task

if TYPE_CHECKING:
    import pandas as pd

    from circuitkd.compare.result import Comparison
    from circuitkd.runs import RunDirectory

METHODS = ("transport", "argmax", "one-to-one")


@dataclass(frozen=True)
class MatchOptions:
    """The options that the matches depend on."""

    teacher: str
    student: str
    task: str
    method: str
    measure: str
    verify: bool
    top: int
    n: int
    seed: int
    ablation: str
    variant: str | None
    bos: str
    device: str
    dtype: str


def run_match(
    options: MatchOptions,
    *,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    batch_size: int | None,
) -> None:
    """Match and print; save where ``out`` says."""
    require_one_of("--method", options.method, METHODS)
    require_one_of("--ablation", options.ablation, ABLATIONS)
    task = checked_task(options)
    models = {"teacher": options.teacher, "student": options.student}
    with quiet_libraries():
        import_libraries()
        check_device(options.device)
        with (
            at_most(threads),
            run_directory(out, "match", options, task, models) as run,
            ProgressBars() as progress,
        ):
            result, matches = _matched(options, task, run, batch_size, progress)
            if run is not None:
                result.save(run.path)
                run.write_text("matches.csv", matches.to_csv(index=False))
    _print(result, matches, options, as_json)
    if out is not None:
        tell("Saved", f"{out}/", "bold")


def _matched(
    options: MatchOptions,
    task: Task,
    run: "RunDirectory | None",
    batch_size: int | None,
    progress: ProgressBars,
) -> "tuple[Comparison, pd.DataFrame]":
    """The comparison without its floor and null, and the table of matches."""
    from circuitkd.compare._loading import load_with_progress
    from circuitkd.compare.comparison import compare
    from circuitkd.compare.result import with_swaps
    from circuitkd.compare.swap import pairs_of, swap_test

    teacher, student = (
        load_with_progress(name, progress, device=options.device, dtype=options.dtype)
        for name in (options.teacher, options.student)
    )
    result = compare(
        teacher,
        student,
        task,
        n=options.n,
        seed=options.seed,
        ablation=options.ablation,
        measure=options.measure,
        bos=options.bos,
        variant=options.variant,
        null_draws=0,
        random_students=0,
        batch_size=batch_size,
        dtype=options.dtype,
        checkpoint=run,
        progress=progress,
    )
    matches = result.matched(options.method)
    if not options.verify:
        return result, matches
    prompts = task.sample_pair(
        teacher, student, options.n, options.seed, variant=options.variant, bos=options.bos
    )
    alike = matches.loc[matches["similarity"] >= result.restructuring.threshold]
    swaps = swap_test(
        teacher,
        student,
        prompts,
        pairs_of(alike, options.top),
        seed=options.seed,
        batch_size=batch_size,
        progress=progress,
    )
    return replace(result, swaps=swaps), with_swaps(matches, swaps)


def _print(
    result: "Comparison", matches: "pd.DataFrame", options: MatchOptions, as_json: bool
) -> None:
    for warning in result.warnings:
        tell("Warning", warning, "bold yellow")
    if as_json:
        json.dump(_plain(result, matches, options), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        from circuitkd.printing import match_view

        results().print(match_view(result, matches, options.method, options.top))


def _plain(result: "Comparison", matches: "pd.DataFrame", options: MatchOptions) -> dict[str, Any]:
    from circuitkd.compare._robustness_files import plain

    kept = ("teacher", "student", "merges", "splits", "drops", "swaps", "warnings", "config",
            "versions")  # fmt: skip
    whole = result.to_json()
    return {
        "method": options.method,
        "matches": plain(matches.astype(object).to_dict("records")),
        **{name: whole[name] for name in kept},
    }
