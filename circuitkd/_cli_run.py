"""What commands that compute share: checks of their options, run directories, threads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from circuitkd.errors import InputError
from circuitkd.tasks import Task, load_task

if TYPE_CHECKING:
    from circuitkd.runs import RunDirectory

MINIMUM_PROMPTS = 8
ABLATIONS = ("mean", "zero", "resample")
DTYPES = ("float32", "bfloat16", "float16")


@runtime_checkable
class Options(Protocol):
    """The options that the numbers of any such command depend on; a dataclass."""

    @property
    def task(self) -> str: ...
    @property
    def variant(self) -> str | None: ...
    @property
    def n(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def checked_task(options: Options) -> Task:
    """The task; raises ``InputError`` for what can be known without loading a model."""
    if options.n < MINIMUM_PROMPTS:
        raise InputError(
            f"-n {options.n} is too few: an interval needs at least {MINIMUM_PROMPTS} prompts."
        )
    if options.seed < 0:
        raise InputError(f"--seed must be 0 or more, not {options.seed}.")
    require_one_of("--dtype", options.dtype, DTYPES)
    task = load_task(options.task)
    task.with_variant(options.variant)
    return task


def require_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """``InputError`` unless an option's value is one of those that are allowed."""
    if value not in allowed:
        raise InputError(f"Unknown {option} {value!r}: choose one of {', '.join(allowed)}.")


def check_device(device: str) -> None:
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
def at_most(threads: int | None) -> Iterator[None]:
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
def run_directory(
    out: Path | None, command: str, options: Options, task: Task, models: Mapping[str, str]
) -> "Iterator[RunDirectory | None]":
    """The run directory, when one is wanted; given back when the input proves impossible.

    Finds (or fetches) all models in any case, so that a wrong name is told before anything runs.
    ``models``: what they are to the command -> name.
    """
    from circuitkd.runs import RunDirectory, check_run_directory

    if out is not None:
        check_run_directory(out)
    identity = _identity(command, options, task, models)
    if out is None:
        yield None
        return
    with RunDirectory.open(out, identity) as run:
        try:
            yield run
        except InputError:
            run.discard()
            raise


def _identity(command: str, options: Any, task: Task, models: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a run, with what their names stand for today."""
    from circuitkd.models import find_directory
    from circuitkd.runs import fingerprint, hash_of

    return {
        "command": command,
        **asdict(options),
        "content": {
            "task": hash_of(task.model_dump(mode="json")),
            **{role: fingerprint(find_directory(name)) for role, name in models.items()},
        },
    }
