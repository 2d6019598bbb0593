"""How a `Comparison` reads: as text, and as plain data."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pandas as pd

from circuitkd.compare import _robustness_files as files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from circuitkd.circuits._role_result import HeadRoles
    from circuitkd.compare._robustness_result import Robustness
    from circuitkd.compare.alignment import Alignment
    from circuitkd.compare.result import Comparison, Performance

_STRONGEST = 8


def as_text(result: "Comparison") -> str:
    """A summary for people: performance, both alignments, strongest matches, restructuring."""
    config = result.config
    variant = f" ({config['variant']})" if config.get("variant") else ""
    left, right = result.performance["teacher"], result.performance["student"]
    lines = [
        f"Teacher {left.name} and student {right.name} on {config['task']}{variant}, "
        f"{config['n']} prompts, {config['ablation']} ablation",
        _performance_line("teacher", left),
        _performance_line("student", right),
        *_number_lines(result),
        "strongest matches (T teacher, S student; mass is the share of influence that moves)",
        *(
            f"  T {row['teacher']:>7} → S {row['student']:<7} similarity {row['similarity']:.2f}, "
            f"mass {row['mass']:.1%}"
            for row in result.matches.head(_STRONGEST).to_dict("records")
        ),
        repr(result.restructuring),
        *([] if result.swaps is None else [repr(result.swaps)]),
        *(repr(roles) for roles in (result.roles or {}).values()),
        repr(result.robustness.brittleness),
        *(f"Note: {warning}" for warning in result.warnings),
    ]
    return "\n".join(lines)


def _performance_line(side: str, performance: "Performance") -> str:
    return (
        f"{side}: {performance.metric} {performance.mean:.3f} "
        f"[{performance.low:.3f}, {performance.high:.3f}] {performance.unit}, "
        f"right on {performance.accuracy:.0%} "
        f"[{performance.accuracy_low:.0%}, {performance.accuracy_high:.0%}]"
        + ("" if performance.competent else ", not competent")
    )


def _number_lines(result: "Comparison") -> list[str]:
    paper = "does not exist" if result.paper_alignment is None else repr(result.paper_alignment)
    numbers = [f"alignment: {result.alignment!r}", f"the paper's number: {paper}"]
    return numbers[::-1] if result.config["preset"] == "paper" else numbers


def as_plain_data(result: "Comparison") -> dict[str, Any]:
    """The result as dictionaries, lists, numbers and strings."""
    paper = result.paper_alignment
    return {
        "alignment": _alignment_data(result.alignment),
        "paper_alignment": None if paper is None else paper.value,
        "alignments": {name: _alignment_data(a) for name, a in result.alignments.items()},
        "chance_similarity": result.chance_similarity,
        "concentration": _records(result.concentration),
        **{side: _performance_data(value) for side, value in result.performance.items()},
        "matches": _records(result.matches),
        "merges": _records(result.restructuring.merges),
        "splits": _records(result.restructuring.splits),
        "drops": _records(result.restructuring.drops),
        "robustness": _robustness_data(result.robustness),
        "roles": None if result.roles is None else _roles_data(result.roles),
        "swaps": None if result.swaps is None else _records(result.swaps.frame),
        "warnings": list(result.warnings),
        "config": dict(result.config),
        "versions": dict(result.versions),
    }


def _robustness_data(robustness: "Robustness") -> dict[str, Any]:
    """Its numbers; warnings, arguments and versions are the comparison's."""
    kept = ("behaviour", "agreement", "brittleness", "parameters")
    return {name: value for name, value in robustness.to_json().items() if name in kept}


def _roles_data(roles: "Mapping[str, HeadRoles]") -> list[dict[str, Any]]:
    """The heads that hold a role, model by model."""
    return [
        {"side": side, "role": role, "node": node.name, "score": score,
         "baseline": own.baselines[role]}
        for side, own in roles.items()
        for role in own.scores
        for node, score in own.holders(role).items()
    ]  # fmt: skip


def _alignment_data(alignment: "Alignment") -> dict[str, Any]:
    return {**asdict(alignment), "calibrated": alignment.calibrated}


def _performance_data(performance: "Performance") -> dict[str, Any]:
    return {
        "name": performance.name,
        "metric_mean": performance.mean,
        "metric_low": performance.low,
        "metric_high": performance.high,
        "unit": performance.unit,
        "accuracy": performance.accuracy,
        "accuracy_low": performance.accuracy_low,
        "accuracy_high": performance.accuracy_high,
        "competent": performance.competent,
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries of plain Python values; what is missing is ``None``."""
    return files.plain(frame.astype(object).to_dict(orient="records"))
