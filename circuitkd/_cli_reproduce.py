"""``circuitkd reproduce``: list what was recorded, or measure one experiment again."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from circuitkd import _cli_options as options
from circuitkd._cli_support import (
    ProgressBars,
    import_libraries,
    quiet_libraries,
    results,
    tell,
    told_in_words,
)
from circuitkd.errors import InputError

if TYPE_CHECKING:
    from circuitkd.recorded.reproduction import Reproduction

app = typer.Typer()

_HELP = (
    "Measure a published experiment again, and compare it with what was recorded.\n\n"
    "Without a name it lists the experiments. Each runs the published procedure with circuitkd's "
    "own code and prints recorded against measured, line by line. Weights come from the model hub; "
    "[bold]arithmetic[/] needs none."
)
_EXAMPLES = """[bold]Examples[/]

circuitkd reproduce

circuitkd reproduce arithmetic

circuitkd reproduce gpt2-numerals -n 256 --out gpt2-numerals.json

circuitkd reproduce robustness --teacher ./gpt2 --student ./distilgpt2

circuitkd reproduce --recorded mine.json --model ./my-model
"""


@dataclass(frozen=True)
class ReproduceOptions:
    """The options that the numbers depend on."""

    name: str | None
    recorded: Path | None
    models: dict[str, str]
    n: int | None
    seed: int
    device: str
    dtype: str


@app.command(help=_HELP, epilog=_EXAMPLES)
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="An experiment; without it, all are listed.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a name, recorded results of your own (docs/reproduce.md).",
            metavar="FILE",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead of the published model.", metavar="MODEL")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Instead of the published teacher.", metavar="MODEL")
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="Instead of the published student.", metavar="MODEL")
    ] = None,
    n: Annotated[
        int | None, typer.Option("-n", help="Number of prompts; by default as published.", min=8)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the result to this JSON file.", metavar="FILE")
    ] = None,
    json: options.Json = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    batch_size: options.BatchSize = None,
) -> None:
    """Measure a published experiment again, and compare it with what was recorded."""
    given = {"model": model, "teacher": teacher, "student": student}
    chosen = ReproduceOptions(
        name=name,
        recorded=recorded,
        models={side: own for side, own in given.items() if own is not None},
        n=n,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    with told_in_words():
        if list_all or (name is None and recorded is None):
            list_records()
        else:
            run_reproduce(chosen, out=out, as_json=json, threads=threads, batch_size=batch_size)


def list_records() -> None:
    """Print what can be reproduced."""
    from circuitkd._printing_reproduction import records_view
    from circuitkd.recorded.schema import record_names, shipped_record

    results().print(records_view([shipped_record(name) for name in record_names()]))


def run_reproduce(
    options: ReproduceOptions,
    *,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    batch_size: int | None,
) -> None:
    """Measure and print; write where ``out`` says."""
    from circuitkd._cli_run import at_most, check_device

    record = _checked(options, out)
    with quiet_libraries():
        import_libraries()
        check_device(options.device)
        with at_most(threads), ProgressBars() as progress:
            from circuitkd.recorded.reproduction import reproduce as measure

            result = measure(
                record,
                models=options.models,
                n=options.n,
                seed=options.seed,
                batch_size=batch_size,
                device=options.device,
                dtype=options.dtype,
                progress=progress,
            )
    if out is not None:
        result.save(out)
    _print(result, as_json)
    if out is not None:
        tell("Saved", str(out), "bold")


def _checked(options: ReproduceOptions, out: Path | None) -> str | Path:
    """The name or the file to reproduce; what can be known to be wrong is told before any work."""
    from circuitkd._cli_run import DTYPES, require_one_of
    from circuitkd.recorded.schema import read_record, shipped_record

    require_one_of("--dtype", options.dtype, DTYPES)
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise InputError(f"--out {out} cannot be written: give a file in a directory that exists.")
    if options.recorded is not None:
        if options.name is not None:
            raise InputError(f"Give either the name {options.name} or --recorded, not both.")
        read_record(options.recorded)
        return options.recorded
    shipped_record(str(options.name))
    return str(options.name)


def _print(result: "Reproduction", as_json: bool) -> None:
    if as_json:
        json.dump(result.to_json(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        from circuitkd._printing_reproduction import reproduction_view

        results().print(reproduction_view(result))
