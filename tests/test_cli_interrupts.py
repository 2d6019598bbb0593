"""Runs that end before they are done: killed, interrupted, failing."""

import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from tiny import save_tiny_model
from typer.testing import CliRunner

from circuitkd._cli_support import ProgressBars, told_in_words
from circuitkd.cli import app
from circuitkd.errors import InputError, RunError

STOP_AFTER_SOME_PARTS = """
import os, signal, sys
from circuitkd import cli, runs

# A process started in the background may have inherited that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

put, kept = runs.RunDirectory.put, []
stop, parts = signal.Signals[sys.argv.pop()], int(sys.argv.pop())

def put_and_stop(self, key, tensors):
    put(self, key, tensors)
    kept.append(key)
    if len(kept) == parts:
        os.kill(os.getpid(), stop)

runs.RunDirectory.put = put_and_stop
cli.main()
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    teacher = save_tiny_model(folder / "teacher", layers=2)
    student = save_tiny_model(folder / "student", layers=1, seed=1)
    return [
        "score",
        "--teacher",
        str(teacher),
        "--student",
        str(student),
        "-n",
        "8",
        "--json",
        "--random-students",
        "1",
    ]


@pytest.fixture(scope="module")
def uninterrupted(
    arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("runs") / "run"
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return results_in(out)


def results_in(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.glob("comparison.*")}


def stop_by(
    signal_name: str, parts: int, arguments: list[str], out: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that gets ``signal_name`` right after so many parts."""
    command = [sys.executable, "-c", STOP_AFTER_SOME_PARTS, *arguments, "--out", str(out)]
    return subprocess.run(
        [*command, str(parts), signal_name], capture_output=True, text=True, check=False
    )


def parts_in(out: Path) -> dict[str, int]:
    return {part.name: part.stat().st_mtime_ns for part in (out / "parts").iterdir()}


@pytest.mark.parametrize("parts", [1, pytest.param(18, marks=pytest.mark.slow)])
def test_a_killed_run_continues_and_ends_like_an_uninterrupted_one(
    tmp_path, arguments, uninterrupted, parts
):
    """Killed in the teacher's first layer, and in the student's."""
    out = tmp_path / "run"
    stopped = stop_by("SIGKILL", parts, arguments, out)
    assert stopped.returncode == -signal.SIGKILL
    assert results_in(out) == {}
    kept = parts_in(out)
    assert len(kept) == parts
    again = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert again.exit_code == 0, again.output
    assert kept.items() <= parts_in(out).items()
    assert results_in(out) == uninterrupted


def test_ctrl_c_says_how_to_continue_and_the_run_does(tmp_path, arguments, uninterrupted):
    out = tmp_path / "run"
    stopped = stop_by("SIGINT", 5, arguments, out)
    assert stopped.returncode == 130
    assert stopped.stdout == ""
    assert "Traceback" not in stopped.stderr
    assert f"Interrupted: Call again with the same arguments to continue in {out}" in stopped.stderr
    assert len(parts_in(out)) == 5
    again = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert again.exit_code == 0, again.output
    assert results_in(out) == uninterrupted


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (InputError("Say it otherwise."), 2, "Error: Say it otherwise."),
        (RunError("It broke."), 1, "Error: It broke."),
        (KeyboardInterrupt(), 130, "Interrupted: Again."),
        (MemoryError(), 1, "Error: There is not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to"), 1, "Error: There is not enough memory"),
        (InputError("[red]not markup[/red] [/x]"), 2, "Error: [red]not markup[/red] [/x]"),
    ],
)
def test_errors_become_a_sentence_and_an_exit_code(capsys, error, code, sentence):
    with pytest.raises(typer.Exit) as exit_, told_in_words("Again."):
        raise error
    assert exit_.value.exit_code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(sentence)


def test_a_fault_of_our_own_keeps_its_traceback():
    for error in (RuntimeError("shapes differ"), ZeroDivisionError()):
        with pytest.raises(type(error)), told_in_words():
            raise error


def test_progress_is_drawn_on_a_terminal_and_leaves_nothing_elsewhere():
    for terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=terminal, width=80)
        with ProgressBars(console) as progress:
            progress("Ablating a [bold] model", 0, 4)
            progress("Ablating a [bold] model", 2, 4)
            progress("Loading", 0, 0)
        assert isinstance(console.file, StringIO)
        drawn = console.file.getvalue()
        assert ("Ablating a [bold] model" in drawn) is terminal
        assert ("50 %" in drawn) is terminal
        assert terminal or drawn == ""


def test_output_that_a_terminal_cannot_show_does_not_end_a_command():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "circuitkd.cli", "tasks", "show", "ioi"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert "[IO]" in shown.stdout
