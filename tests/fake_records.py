"""Recorded results made up for the bundled models: every quantity that is measured on a model."""

import json
from pathlib import Path
from typing import Any

from circuitkd.recorded.schema import DATA_DIRECTORY, SCHEMA

PROMPTS = 16
CIRCUIT = ["a0.h0", "a0.h1", "a0.h2", "a1.h1", "m0", "m1"]
BECAUSE = "the dog ate the notebook"

Json = dict[str, Any]


def one_model() -> Json:
    """About tiny-student on numerals; recorded numbers are far off, except by chance."""
    side = {"side": "model"}
    circuit = side | {"circuit": "mine"}
    return {
        "schema": SCHEMA,
        "name": "fake-numerals",
        "title": "A student of nobody",
        "source": "nowhere",
        "models": {"model": "tiny-student"},
        "task": str(DATA_DIRECTORY / "numerals.yaml"),
        "prompts": PROMPTS,
        "circuits": {"mine": CIRCUIT},
        "lines": [
            wrong("clean", "logits", **side),
            wrong("retained_pct", "%", **side, node="a0.h1"),
            wrong("retained_pct", "%", **side, node="m1"),
            wrong("mean_change_pct", "points", **side),
            wrong("circuit_retained_pct", "%", **circuit),
            wrong("leave_one_out_pct", "%", **circuit, node="a0.h1"),
            wrong("pruned_retained_pct", "%", **side),
            wrong("pruned_heads", "heads", **side),
            wrong("pruned_mlps", "MLPs", **side),
            wrong("pruned_overlap_pct", "%", **circuit),
            wrong("retained_pct", "%", **side, node="a0.h1", reason=BECAUSE),
        ],
    }


def two_models() -> Json:
    """About the bundled pair, every second line of the student's."""
    return {
        "schema": SCHEMA,
        "name": "fake-pair",
        "title": "A pair",
        "source": "nowhere",
        "models": {"teacher": "tiny-teacher", "student": "tiny-student"},
        "task": "ioi",
        "prompts": PROMPTS,
        "ablation": "zero",
        "lines": [
            wrong("mean_drop_pct", "%", side="teacher"),
            wrong("severity", side="student"),
            wrong("gini", side="student"),
            wrong("mean_drop_pct", "points", side="difference"),
            wrong("mean_drop_pct", "points", side="per_tenth"),
            wrong("head_similarity", node="a0.h1", match="a1.h2"),
            wrong("paper_alignment"),
        ],
    }


def wrong(quantity: str, unit: str = "", **about: Any) -> Json:
    """A line whose number nobody can measure."""
    line = {"quantity": quantity, "recorded": -12345.0, "unit": unit, **about}
    return line if "reason" in about else line | {"tolerance": 1e-3}


def write(record: Json, folder: Path) -> Path:
    """The record as a file."""
    path = folder / f"{record['name']}.json"
    path.write_text(json.dumps(record))
    return path
