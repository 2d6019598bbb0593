"""The commands that compare two models: score, match, robustness."""

from typing import Annotated

import typer

from circuitkd import _cli_options as options
from circuitkd._cli_support import told_in_words

app = typer.Typer()


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
    teacher: options.Teacher = "tiny-teacher",
    student: options.Student = "tiny-student",
    task: options.Task = "ioi",
    n: options.N = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the bootstrap.")] = 0,
    ablation: options.Ablation = "mean",
    preset: Annotated[
        str, typer.Option(help="circuitkd's measures, or the paper's.", metavar="default|paper")
    ] = "default",
    random_students: Annotated[
        int,
        typer.Option(
            help="Randomly initialised students behind the floor; each costs what measuring the "
            "student costs.",
        ),
    ] = 5,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also print the evidence and all matches, with head roles, the swap test of the "
            "strongest matches, and behaviour on perturbed inputs.",
        ),
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
    """Compare the circuits with which a teacher and a student solve a task."""
    from circuitkd._cli_score import ScoreOptions, run_score

    chosen = ScoreOptions(
        teacher=teacher,
        student=student,
        task=task,
        n=n,
        seed=seed,
        ablation=ablation,
        preset=preset,
        random_students=random_students,
        details=details,
        variant=variant,
        bos=bos,
        device=device,
        dtype=dtype,
    )
    with told_in_words(options.continue_hint(out)):
        run_score(
            chosen,
            out=out,
            as_json=json,
            threads=threads,
            batch_size=batch_size,
        )


_MATCH_HELP = (
    "Pair the heads and MLPs of a teacher and a student.\n\n"
    "[bold]transport[/] moves all of the teacher's influence onto the student's at the greatest "
    "similarity; [bold]argmax[/] gives each student component its most similar teacher component; "
    "[bold]one-to-one[/] lets no component be taken twice. --verify puts the strongest pairs to "
    "the swap test: the student's component does the teacher's work, or it does not."
)
_MATCH_EXAMPLES = """[bold]Examples[/]

circuitkd match --task numerals --verify

circuitkd match --teacher gpt2 --student distilgpt2 --measure svcca --method one-to-one
"""


@app.command(help=_MATCH_HELP, epilog=_MATCH_EXAMPLES)
def match(
    teacher: options.Teacher = "tiny-teacher",
    student: options.Student = "tiny-student",
    task: options.Task = "ioi",
    method: Annotated[
        str, typer.Option(help="Of matching.", metavar="transport|argmax|one-to-one")
    ] = "transport",
    measure: Annotated[
        str,
        typer.Option(
            help="Of similarity: default, cka, procrustes, principal_angles, svcca, "
            "attention_correlation, attention_cosine, attention_js, paper or paper_rescaled.",
            metavar="NAME",
        ),
    ] = "default",
    verify: Annotated[
        bool, typer.Option("--verify", help="Put the strongest pairs to the swap test.")
    ] = False,
    top: Annotated[int, typer.Option(help="How many pairs to print, or to verify.", min=1)] = 10,
    n: options.N = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the bootstrap.")] = 0,
    ablation: options.Ablation = "mean",
    variant: options.Variant = None,
    bos: options.Bos = "auto",
    out: options.Out = None,
    json: options.Json = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    batch_size: options.BatchSize = None,
) -> None:
    """Pair the heads and MLPs of a teacher and a student."""
    from circuitkd._cli_match import MatchOptions, run_match

    chosen = MatchOptions(
        teacher=teacher,
        student=student,
        task=task,
        method=method,
        measure=measure,
        verify=verify,
        top=top,
        n=n,
        seed=seed,
        ablation=ablation,
        variant=variant,
        bos=bos,
        device=device,
        dtype=dtype,
    )
    with told_in_words(options.continue_hint(out)):
        run_match(chosen, out=out, as_json=json, threads=threads, batch_size=batch_size)


_ROBUSTNESS_HELP = (
    "Compare how a teacher and a student bear perturbed inputs and ablated components.\n\n"
    "Prints accuracy and metric of both on every out-of-distribution variant of the task and under "
    "noise on the embeddings, how often they agree, and what the metric loses when one head or MLP "
    "is ablated."
)
_ROBUSTNESS_EXAMPLES = """[bold]Examples[/]

circuitkd robustness

circuitkd robustness --task numerals --variant typos --variant unseen_words --noise 0.5

circuitkd robustness --teacher gpt2 --student distilgpt2 --task numerals --out runs/robustness
"""


@app.command(help=_ROBUSTNESS_HELP, epilog=_ROBUSTNESS_EXAMPLES)
def robustness(
    teacher: options.Teacher = "tiny-teacher",
    student: options.Student = "tiny-student",
    task: options.Task = "ioi",
    n: Annotated[int, typer.Option("-n", help="Prompts under each condition, at least 8.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the noise.")] = 0,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this variant of the task; can be given several times. By default all.",
            metavar="NAME",
        ),
    ] = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(
            help="Size of the noise on the embeddings, 1 being their root mean square; can be "
            "given several times. By default 0.25, 0.5, 0.75 and 1.",
        ),
    ] = None,
    ablation: Annotated[
        str,
        typer.Option(
            help="What replaces an ablated component's output (see circuitkd influence --help); "
            "none leaves ablation out.",
            metavar="mean|zero|resample|none",
        ),
    ] = "mean",
    bos: options.Bos = "auto",
    out: options.Out = None,
    json: options.Json = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    batch_size: options.BatchSize = None,
) -> None:
    """Compare how a teacher and a student bear perturbed inputs and ablated components."""
    from circuitkd._cli_robustness import RobustnessOptions, run_robustness

    chosen = RobustnessOptions(
        teacher=teacher,
        student=student,
        task=task,
        n=n,
        seed=seed,
        variants=tuple(variant) if variant else None,
        noise=tuple(noise) if noise else None,
        ablation=ablation,
        bos=bos,
        device=device,
        dtype=dtype,
    )
    with told_in_words(options.continue_hint(out)):
        run_robustness(chosen, out=out, as_json=json, threads=threads, batch_size=batch_size)
