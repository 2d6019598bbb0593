"""The command line. Options are checked here; the work is done by the library.

Results go to standard output; progress, warnings and errors to standard error. Exit codes: 0 done,
2 wrong use or input, 1 a failure while running, 130 interrupted. Heavy modules are imported by the
commands that need them, so that ``--help`` answers at once.
"""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from circuitkd import __version__
from circuitkd._cli_support import INTERRUPTED, told_in_words

_EXAMPLES = """[bold]Examples[/]

circuitkd score (compares the bundled models on IOI: offline, in seconds)

circuitkd tasks show numerals --model tiny-teacher

circuitkd models
"""

app = typer.Typer(
    name="circuitkd",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXAMPLES,
)


class _Group(TyperGroup):
    # What Typer passes to a callback is otherwise not the typer.Context that it is annotated with.
    context_class = typer.Context


tasks_app = typer.Typer(cls=_Group, invoke_without_command=True)
app.add_typer(tasks_app, name="tasks")


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show × or → must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"circuitkd {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def circuitkd(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Does a distilled student solve a task with the same internal circuit as its teacher?"""


_SCORE_HELP = (
    "Compare the circuits with which a teacher and a student solve a task.\n\n"
    "Prints how well each model does the task, the circuit alignment (1: the student does it with "
    "its teacher's circuit, 0: with nothing like it), the matched components, and what was merged, "
    "split or dropped."
)
_SCORE_EXAMPLES = """[bold]Examples[/]

circuitkd score

circuitkd score --teacher gpt2 --student distilgpt2 --task numerals --out runs/gpt2

circuitkd score --teacher ./teacher --student ./student --task my_task.yaml --json > score.json
"""


@app.command(help=_SCORE_HELP, epilog=_SCORE_EXAMPLES)
def score(
    teacher: Annotated[
        str, typer.Option(help="A bundled model, a directory, or a hub id.", metavar="MODEL")
    ] = "tiny-teacher",
    student: Annotated[
        str, typer.Option(help="Likewise; read with its own tokenizer.", metavar="MODEL")
    ] = "tiny-student",
    task: Annotated[
        str, typer.Option(help="A shipped task, or a task file (.yaml).", metavar="TASK")
    ] = "ioi",
    n: Annotated[int, typer.Option("-n", help="Number of prompts, at least 8.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the bootstrap.")] = 0,
    ablation: Annotated[
        str,
        typer.Option(
            help="What replaces a component's output: its mean over corrupted prompts, zero, or "
            "its value on a corrupted prompt.",
            metavar="mean|zero|resample",
        ),
    ] = "mean",
    preset: Annotated[
        str, typer.Option(help="circuitkd's measures, or the paper's.", metavar="default|paper")
    ] = "default",
    variant: Annotated[
        str | None,
        typer.Option(help="An out-of-distribution variant of the task.", metavar="NAME"),
    ] = None,
    bos: Annotated[
        str,
        typer.Option(
            help="Beginning-of-sequence token: what each tokenizer does itself (auto), none, or "
            "this token.",
            metavar="auto|none|TOKEN",
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Save everything here; an interrupted run continues when it is called again with "
            "the same arguments.",
            metavar="DIR",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(help="Number format of the weights.", metavar="float32|bfloat16|float16"),
    ] = "float32",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; fewer is faster where others work too.", min=1),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts at once; by default what suits the machine.", min=1),
    ] = None,
) -> None:
    """Compare the circuits with which a teacher and a student solve a task."""
    from circuitkd._cli_score import ScoreOptions, run_score

    options = ScoreOptions(
        teacher=teacher,
        student=student,
        task=task,
        n=n,
        seed=seed,
        ablation=ablation,
        preset=preset,
        variant=variant,
        bos=bos,
        device=device,
        dtype=dtype,
    )
    if out is None:
        hint = "With --out DIR, an interrupted run can be continued."
    else:
        hint = f"Call again with the same arguments to continue in {out}."
    with told_in_words(hint):
        run_score(options, out=out, as_json=json, threads=threads, batch_size=batch_size)


_MODELS_EXAMPLES = """[bold]Examples[/]

circuitkd models

circuitkd score --teacher gpt2 --student ./my-student
"""


@app.command(epilog=_MODELS_EXAMPLES)
def models() -> None:
    """List the bundled models, and say how to name others."""
    from circuitkd._cli_lists import list_models

    with told_in_words():
        list_models()


_TASKS_EXAMPLES = """[bold]Examples[/]

circuitkd tasks

circuitkd tasks show ioi --model tiny-teacher
"""


@tasks_app.callback(epilog=_TASKS_EXAMPLES)
def tasks(context: typer.Context) -> None:
    """List the shipped tasks; [bold]circuitkd tasks show NAME[/] prints samples of one."""
    if context.invoked_subcommand is None:
        from circuitkd._cli_lists import list_tasks

        with told_in_words():
            list_tasks()


_SHOW_EXAMPLES = """[bold]Examples[/]

circuitkd tasks show ioi

circuitkd tasks show greater_than --model gpt2 -n 5

circuitkd tasks show my_task.yaml --variant unseen_words
"""


@tasks_app.command("show", epilog=_SHOW_EXAMPLES)
def show(
    name: Annotated[str, typer.Argument(help="A shipped task, or a task file (.yaml).")],
    model: Annotated[
        str | None,
        typer.Option(help="Show the tokens that this model reads.", metavar="MODEL"),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="An out-of-distribution variant.", metavar="NAME")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Number of samples.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the samples.", min=0)] = 0,
    bos: Annotated[
        str, typer.Option(help="With --model: auto, none, or a token.", metavar="auto|none|TOKEN")
    ] = "auto",
) -> None:
    """Print sample prompts of a task, clean and corrupted, with their labelled positions."""
    from circuitkd._cli_lists import show_task

    with told_in_words():
        show_task(name, model=model, variant=variant, n=n, seed=seed, bos=bos)


if __name__ == "__main__":
    main()
