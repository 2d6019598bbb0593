"""What all commands share: where output goes, how errors are told, and progress."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from circuitkd.errors import CircuitKDError, InputError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it (128 + SIGINT)."""


def results() -> Console:
    """The console for results: standard output."""
    return Console(highlight=False)


def messages() -> Console:
    """The console for progress, warnings and errors: standard error."""
    return Console(stderr=True, highlight=False)


@contextmanager
def told_in_words(after_interrupt: str = "") -> Iterator[None]:
    """Turn the errors that circuitkd raises on purpose, and Ctrl-C, into a sentence and a code.

    Wrong input exits with 2, a failure while running with 1, Ctrl-C with 130 and the hint
    ``after_interrupt``. Anything else is a fault in circuitkd and keeps its traceback.
    """
    try:
        yield
    except CircuitKDError as error:
        tell("Error", str(error), "bold red")
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt:
        tell("Interrupted", after_interrupt or "Nothing was written.", "bold yellow")
        raise typer.Exit(INTERRUPTED) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        hint = "There is not enough memory: try a smaller --batch-size, or --dtype bfloat16."
        tell("Error", hint, "bold red")
        raise typer.Exit(1) from None


def tell(kind: str, sentence: str, style: str) -> None:
    """One message on standard error. What it quotes is never read as markup."""
    messages().print(Text.assemble((f"{kind}:", style), " ", sentence), soft_wrap=True)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep what libraries say out of standard output, and their chatter out of standard error."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_libraries() -> None:
    """Import what loading a model needs, which takes seconds, and tell it to be quiet."""
    with ProgressBars() as progress:
        progress("Getting ready", 0, 0)
        import transformers

        import circuitkd.compare.comparison  # noqa: F401
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("transformer_lens", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


class ProgressBars:
    """One bar for each stage of a computation, on standard error; nothing where that is a file.

    An instance is what computing functions take as ``progress(stage, done, total)``. With total 0
    a stage shows that it is running, without a bar.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or messages()
        self._stages: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(stage, total=total or None)
        self._progress.update(self._stages[stage], completed=done, total=total or None)

    def __enter__(self) -> "ProgressBars":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
