"""Options that several commands have, each with one help text."""

from pathlib import Path
from typing import Annotated

import typer

MODEL = "A bundled model, smollm2-135m, a directory, or a hub id."
Teacher = Annotated[str, typer.Option(help=MODEL, metavar="MODEL")]
Student = Annotated[
    str, typer.Option(help="Likewise; read with its own tokenizer.", metavar="MODEL")
]
Task = Annotated[str, typer.Option(help="A shipped task, or a task file (.yaml).", metavar="TASK")]
N = Annotated[int, typer.Option("-n", help="Number of prompts, at least 8.")]
Variant = Annotated[
    str | None,
    typer.Option(help="An out-of-distribution variant of the task.", metavar="NAME"),
]
Bos = Annotated[
    str,
    typer.Option(
        help="Beginning-of-sequence token: what each tokenizer does itself (auto), none, or "
        "this token.",
        metavar="auto|none|TOKEN",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Save everything here; an interrupted run continues when it is called again with "
        "the same arguments.",
        metavar="DIR",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")]
Dtype = Annotated[
    str,
    typer.Option(help="Number format of the weights.", metavar="float32|bfloat16|float16"),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads; fewer is faster where others work too.", min=1),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Prompts at once; by default what suits the machine.", min=1),
]
Ablation = Annotated[
    str,
    typer.Option(
        help="What replaces a component's output: its mean over corrupted prompts, zero, or "
        "its value on a corrupted prompt.",
        metavar="mean|zero|resample",
    ),
]


def continue_hint(out: Path | None) -> str:
    """What to say after Ctrl-C."""
    if out is None:
        return "With --out DIR, an interrupted run can be continued."
    return f"Call again with the same arguments to continue in {out}."
