"""The command line. Options are checked here; the work is done by the library.

Results go to standard output; progress, warnings and errors to standard error. Exit codes: 0 done,
2 wrong use or input, 1 a failure while running, 130 interrupted. Heavy modules are imported by the
commands that need them, so that ``--help`` answers at once.
"""

import io
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from circuitkd import __version__
from circuitkd import _cli_options as options
from circuitkd._cli_pair import app as pair_app
from circuitkd._cli_reproduce import app as reproduce_app
from circuitkd._cli_support import INTERRUPTED, told_in_words

_EXAMPLES = """[bold]Examples[/]

circuitkd score (compares the bundled models on IOI: offline, in seconds)

circuitkd circuit tiny-teacher --task numerals

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


app.add_typer(pair_app)

_INFLUENCE_EXAMPLES = """[bold]Examples[/]

circuitkd influence tiny-teacher --task numerals

circuitkd influence gpt2 --task ioi --ablation resample --out runs/gpt2-influence
"""


@app.command(epilog=_INFLUENCE_EXAMPLES)
def influence(
    model: Annotated[str, typer.Argument(help=options.MODEL)],
    task: options.Task = "ioi",
    n: options.N = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    ablation: options.Ablation = "mean",
    variant: options.Variant = None,
    bos: options.Bos = "auto",
    top: Annotated[int, typer.Option(help="How many nodes to print.", min=1)] = 12,
    out: options.Out = None,
    json: options.Json = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    batch_size: options.BatchSize = None,
) -> None:
    """Measure what each head and MLP of a model does for a task, by ablating one at a time."""
    from circuitkd._cli_circuit import InfluenceOptions, run_influence

    chosen = InfluenceOptions(
        model=model,
        task=task,
        n=n,
        seed=seed,
        ablation=ablation,
        variant=variant,
        bos=bos,
        device=device,
        dtype=dtype,
    )
    with told_in_words(options.continue_hint(out)):
        run_influence(
            chosen, out=out, as_json=json, top=top, threads=threads, batch_size=batch_size
        )


_CIRCUIT_HELP = (
    "Find the circuit with which a model solves a task, and judge it on other prompts.\n\n"
    "Methods: [bold]prune[/] removes heads and MLPs while enough of the metric is left; "
    "[bold]acdc[/] removes edges from the logits backward; [bold]path-patching[/] measures every "
    "edge exactly, [bold]eap[/] and [bold]eap-ig[/] estimate it by gradients, [bold]auto[/] "
    "estimates all edges and measures the strongest; these keep the strongest edges."
)
_CIRCUIT_EXAMPLES = """[bold]Examples[/]

circuitkd circuit tiny-teacher --task numerals

circuitkd circuit tiny-teacher --task ioi --method eap-ig --top 300 --details

circuitkd circuit gpt2 --task ioi --method acdc --threshold 0.005 --out runs/gpt2-acdc
"""


@app.command(help=_CIRCUIT_HELP, epilog=_CIRCUIT_EXAMPLES)
def circuit(
    model: Annotated[str, typer.Argument(help=options.MODEL)],
    task: options.Task = "ioi",
    method: Annotated[
        str,
        typer.Option(help="How to search.", metavar="prune|acdc|path-patching|eap|eap-ig|auto"),
    ] = "prune",
    threshold: Annotated[
        float | None,
        typer.Option(
            help="A share of the metric. prune: what may be lost in all (default 0.2). Others: "
            "an edge that matters less goes (default 0.002).",
            min=0,
            max=1,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="Instead of a threshold, this many of the strongest edges.", min=1),
    ] = None,
    n: Annotated[
        int,
        typer.Option("-n", help="Prompts to search on, at least 8; as many others judge."),
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the tests.")] = 0,
    ablation: Annotated[
        str | None,
        typer.Option(
            help="What replaces what is left out: its mean over corrupted prompts (default of "
            "prune), its value on a corrupted prompt (default of all others), or zero.",
            metavar="mean|zero|resample",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Gradients a prompt of eap-ig and auto.", min=1)] = 5,
    details: Annotated[
        bool,
        typer.Option("--details", help="Also leave out each part, and test the circuit's claims."),
    ] = False,
    variant: options.Variant = None,
    bos: options.Bos = "auto",
    out: options.Out = None,
    json: options.Json = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    batch_size: options.BatchSize = None,
) -> None:
    """Find the circuit with which a model solves a task, and judge it on other prompts."""
    from circuitkd._cli_circuit import CircuitOptions, run_circuit

    chosen = CircuitOptions(
        model=model,
        task=task,
        method=method,
        threshold=threshold,
        top=top,
        n=n,
        seed=seed,
        ablation=ablation,
        steps=steps,
        details=details,
        variant=variant,
        bos=bos,
        device=device,
        dtype=dtype,
    )
    with told_in_words(options.continue_hint(out)):
        run_circuit(chosen, out=out, as_json=json, threads=threads, batch_size=batch_size)


app.add_typer(reproduce_app)

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


_DOCTOR_EXAMPLES = """[bold]Examples[/]

circuitkd doctor

HF_HUB_OFFLINE=1 circuitkd doctor (without asking the model hub)
"""


@app.command(epilog=_DOCTOR_EXAMPLES)
def doctor() -> None:
    """Say what is installed, on which devices, whether the hub answers, and what would run.

    Exits with 1 when something that circuitkd needs is broken.
    """
    from circuitkd._cli_lists import print_diagnosis

    with told_in_words():
        print_diagnosis()


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
    variant: options.Variant = None,
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
