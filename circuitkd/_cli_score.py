"""``circuitkd score``: check everything cheap, then compute, then print."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuitkd._cli_support import (
    ProgressBars,
    import_libraries,
    quiet_libraries,
    results,
    tell,
)
from circuitkd.errors import InputError
from circuitkd.tasks import Task, load_task

if TYPE_CHECKING:
    from circuitkd.compare.comparison import Comparison
    from circuitkd.runs import RunDirectory

MINIMUM_PROMPTS = 8
ABLATIONS = ("mean", "zero", "resample")
PRESETS = ("default", "paper")
DTYPES = ("float32", "bfloat16", "float16")


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
    task = _checked(options)
    with quiet_libraries():
        import_libraries()
        _check_device(options.device)
        with (
            _at_most(threads),
            _run_directory(out, options, task) as run,
            ProgressBars() as progress,
        ):
            result = _compare(options, task, run, batch_size, progress)
            if run is not None:
                result.save(run.path)
    _print(result, as_json)
    if out is not None:
        tell("Saved", f"{out}/", "bold")


def _checked(options: ScoreOptions) -> Task:
    """The task; raises ``InputError`` for what can be known without loading a model."""
    if options.n < MINIMUM_PROMPTS:
        raise InputError(
            f"-n {options.n} is too few: an interval needs at least {MINIMUM_PROMPTS} prompts."
        )
    if options.seed < 0:
        raise InputError(f"--seed must be 0 or more, not {options.seed}.")
    for option, value, allowed in (
        ("--ablation", options.ablation, ABLATIONS),
        ("--preset", options.preset, PRESETS),
        ("--dtype", options.dtype, DTYPES),
    ):
        if value not in allowed:
            raise InputError(f"Unknown {option} {value!r}: choose one of {', '.join(allowed)}.")
    task = load_task(options.task)
    task.with_variant(options.variant)
    return task


def _check_device(device: str) -> None:
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        raise InputError(f"Unknown --device {device!r}: cpu, cuda, cuda:1, mps, …") from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"--device {device} cannot be used here: {reason}.") from error


@contextmanager
def _at_most(threads: int | None) -> Iterator[None]:
    """Limit the CPU threads of torch, and of the linear algebra under NumPy and SciPy."""
    if threads is None:
        yield
        return
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _run_directory(
    out: Path | None, options: ScoreOptions, task: Task
) -> "Iterator[RunDirectory | None]":
    """The run directory, when one is wanted; given back when the input proves impossible.

    Finds (or fetches) both models in any case, so that a wrong name is told before anything runs.
    """
    from circuitkd.runs import RunDirectory, check_run_directory

    if out is not None:
        check_run_directory(out)
    identity = _identity(options, task)
    if out is None:
        yield None
        return
    with RunDirectory.open(out, identity) as run:
        try:
            yield run
        except InputError:
            run.discard()
            raise


def _identity(options: ScoreOptions, task: Task) -> dict[str, Any]:
    """The arguments of a run, with what their names stand for today."""
    from circuitkd.models import find_directory
    from circuitkd.runs import fingerprint, hash_of

    names = {"teacher": options.teacher, "student": options.student}
    return {
        "command": "score",
        **asdict(options),
        "content": {
            "task": hash_of(task.model_dump(mode="json")),
            **{side: fingerprint(find_directory(name)) for side, name in names.items()},
        },
    }


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
        batch_size=batch_size,
        device=options.device,
        dtype=options.dtype,
        checkpoint=run,
        progress=progress,
    )


def _print(result: "Comparison", as_json: bool) -> None:
    for warning in result.warnings:
        tell("Warning", warning, "bold yellow")
    if as_json:
        json.dump(result.to_json(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        from circuitkd.printing import comparison_view

        results().print(comparison_view(result))
