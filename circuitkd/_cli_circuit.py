"""``circuitkd influence`` and ``circuitkd circuit``: one model, one task."""

import json
import sys
from dataclasses import asdict, dataclass
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
    from transformer_lens.model_bridge import TransformerBridge

    from circuitkd.circuits.discovery import Discovery
    from circuitkd.circuits.evaluation import CircuitReport
    from circuitkd.circuits.influence import Influence
    from circuitkd.prompts import Prompts
    from circuitkd.runs import RunDirectory


@dataclass(frozen=True)
class InfluenceOptions:
    """The options that the numbers depend on."""

    model: str
    task: str
    n: int
    seed: int
    ablation: str
    variant: str | None
    bos: str
    device: str
    dtype: str


@dataclass(frozen=True)
class CircuitOptions:
    """The options that the circuit and the numbers depend on."""

    model: str
    task: str
    method: str
    threshold: float | None
    top: int | None
    n: int
    seed: int
    ablation: str | None
    steps: int
    details: bool
    variant: str | None
    bos: str
    device: str
    dtype: str


def run_influence(
    options: InfluenceOptions,
    *,
    out: Path | None,
    as_json: bool,
    top: int,
    threads: int | None,
    batch_size: int | None,
) -> None:
    """Measure and print; save where ``out`` says."""
    require_one_of("--ablation", options.ablation, ABLATIONS)
    task = checked_task(options)
    with quiet_libraries():
        import_libraries()
        check_device(options.device)
        with (
            at_most(threads),
            run_directory(out, "influence", options, task, {"model": options.model}) as run,
            ProgressBars() as progress,
        ):
            model = _load(options, progress)
            prompts = task.sample(
                model, options.n, options.seed, variant=options.variant, bos=options.bos
            )
            influence = _measured(model, prompts, options.ablation, batch_size, run, progress)
            if run is not None:
                influence.save(run.path / "influence.safetensors")
                run.write_text("influence.csv", influence.frame.to_csv(index=False))
    if not influence.competent:
        tell("Warning", _INCOMPETENT.format(options.model), "bold yellow")
    if as_json:
        _print_json(_influence_data(options, influence))
    else:
        from circuitkd._printing_circuits import influence_view

        results().print(influence_view(influence, top))
    _say_where(out)


def run_circuit(
    options: CircuitOptions,
    *,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    batch_size: int | None,
) -> None:
    """Search, judge and print; save where ``out`` says."""
    if options.ablation is not None:
        require_one_of("--ablation", options.ablation, ABLATIONS)
    task = checked_task(options)
    with quiet_libraries():
        import_libraries()
        check_device(options.device)
        _check_method(options)
        with (
            at_most(threads),
            run_directory(out, "circuit", options, task, {"model": options.model}) as run,
            ProgressBars() as progress,
        ):
            model = _load(options, progress)
            searched, judged = _two_samples(task, model, options)
            found = _found(model, searched, options, batch_size, run, progress)
            report = _judged(model, judged, found, options, batch_size, progress)
            if run is not None:
                _save(run, found, report)
    shared = len(set(searched.texts) & set(judged.texts))
    if shared:
        tell("Warning", _TOO_FEW.format(shared, len(judged)), "bold yellow")
    if as_json:
        _print_json(_circuit_data(options, found, report, shared))
    else:
        from circuitkd._printing_circuits import circuit_view

        results().print(circuit_view(found, report))
    _say_where(out)


_INCOMPETENT = (
    "{} does not do this task: its metric is not above 0, so percentages are withheld and the "
    "effects describe no solution."
)
_TOO_FEW = (
    "The task has too few different prompts: {} of the {} that judge the circuit were also "
    "searched on."
)


def _check_method(options: CircuitOptions) -> None:
    from circuitkd.circuits.discovery import METHODS, check_method

    require_one_of("--method", options.method, METHODS)
    check_method(options.method, options.top, options.ablation, options.threshold)


def _load(
    options: InfluenceOptions | CircuitOptions, progress: ProgressBars
) -> "TransformerBridge":
    from circuitkd.models import load_model

    stage = f"Loading {options.model}"
    progress(stage, 0, 0)
    model = load_model(options.model, device=options.device, dtype=options.dtype)
    progress(stage, 1, 1)
    return model


def _measured(
    model: "TransformerBridge",
    prompts: "Prompts",
    ablation: str,
    batch_size: int | None,
    run: "RunDirectory | None",
    progress: ProgressBars,
) -> "Influence":
    from circuitkd.circuits.influence import node_influence
    from circuitkd.runs import NO_CHECKPOINT

    return node_influence(
        model,
        prompts,
        ablation=ablation,
        batch_size=batch_size,
        checkpoint=run or NO_CHECKPOINT,
        progress=progress,
    )


def _two_samples(
    task: Task, model: "TransformerBridge", options: CircuitOptions
) -> "tuple[Prompts, Prompts]":
    """Prompts to search on, and other ones to judge what was found."""
    n = options.n
    both = task.sample(model, 2 * n, options.seed, variant=options.variant, bos=options.bos)
    return both.take(range(n)), both.take(range(n, 2 * n))


def _found(
    model: "TransformerBridge",
    prompts: "Prompts",
    options: CircuitOptions,
    batch_size: int | None,
    run: "RunDirectory | None",
    progress: ProgressBars,
) -> "Discovery":
    from circuitkd.circuits.discovery import find_circuit
    from circuitkd.runs import NO_CHECKPOINT

    return find_circuit(
        model,
        prompts,
        options.method,
        threshold=options.threshold,
        top=options.top,
        ablation=options.ablation,
        steps=options.steps,
        batch_size=batch_size,
        checkpoint=run or NO_CHECKPOINT,
        progress=progress,
    )


def _judged(
    model: "TransformerBridge",
    prompts: "Prompts",
    found: "Discovery",
    options: CircuitOptions,
    batch_size: int | None,
    progress: ProgressBars,
) -> "CircuitReport":
    from circuitkd.circuits.evaluation import evaluate_circuit

    return evaluate_circuit(
        model,
        prompts,
        found.circuit,
        minimality=options.details,
        tests=options.details,
        seed=options.seed,
        batch_size=batch_size,
        progress=progress,
    )


def _save(run: "RunDirectory", found: "Discovery", report: "CircuitReport") -> None:
    """The circuit, its judgement, the scores of all edges, and the graph that others read."""
    from circuitkd.circuits._formats import write_graph

    found.circuit.save(run.path / "circuit.json")
    report.save(run.path / "report.json")
    if found.scores is not None:
        found.scores.save(run.path / "scores.safetensors")
    by_edge = None if found.scores is None else found.scores.by_edge
    write_graph(found.circuit, run.path / "graph.json", edge_scores=by_edge)


def _influence_data(options: InfluenceOptions, influence: "Influence") -> dict[str, Any]:
    from circuitkd.runs import versions

    low, high = influence.clean_interval
    return {
        "model": influence.model,
        "task": influence.task,
        "metric": influence.metric,
        "unit": influence.unit,
        "metric_mean": float(influence.clean.double().mean()),
        "metric_low": low,
        "metric_high": high,
        "accuracy": influence.accuracy,
        "competent": influence.competent,
        "nodes": _records(influence.frame),
        "config": asdict(options),
        "versions": versions(),
    }


def _circuit_data(
    options: CircuitOptions, found: "Discovery", report: "CircuitReport", shared: int
) -> dict[str, Any]:
    from circuitkd.circuits._formats import circuit_document
    from circuitkd.runs import versions

    return {
        "circuit": circuit_document(found.circuit),
        "runs": _records(report.frame),
        "unit": report.unit,
        "competent": report.competent,
        "nodes": _records(report.nodes),
        "edges": _records(report.edges),
        "tests": [] if report.tests is None else _records(report.tests.frame),
        "prompts_in_both_samples": shared,
        "config": asdict(options),
        "versions": versions(),
    }


def _records(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """Rows as plain values; what is missing is null."""
    plain = frame.astype(object).where(frame.notna(), None)
    return plain.to_dict(orient="records")  # pyright: ignore[reportReturnType]


def _print_json(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _say_where(out: Path | None) -> None:
    if out is not None:
        tell("Saved", f"{out}/", "bold")
