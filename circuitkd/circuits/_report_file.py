"""The JSON file of a ``CircuitReport``."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from circuitkd.circuits._formats import circuit_document, circuit_from, read_json, write_json
from circuitkd.circuits.curves import Curve, Recovery
from circuitkd.circuits.hypothesis_tests import HypothesisTests
from circuitkd.errors import InputError

SCHEMA = "circuitkd.circuit-report/1"

_TEXTS = ("model", "task", "ablation", "metric")
_TENSORS = ("full", "kept", "without", "nothing", "node_effects", "edge_effects")
_PARTS = {"tests": HypothesisTests, "curve": Curve, "recovery": Recovery}


def save_report(report: Any, path: str | Path) -> None:
    """Write a report; the file appears whole or not at all."""
    document: dict[str, Any] = {"schema": SCHEMA, "circuit": circuit_document(report.circuit)}
    document |= {key: getattr(report, key) for key in _TEXTS}
    document |= {key: getattr(report, key).tolist() for key in _TENSORS}
    for key in _PARTS:
        part = getattr(report, key)
        document[key] = None if part is None else {k: _out(v) for k, v in vars(part).items()}
    write_json(path, document)


def read_report(path: str | Path) -> dict[str, Any]:
    """The fields of a report."""
    document = read_json(path)
    if document.pop("schema", None) != SCHEMA:
        raise InputError(f"{path} is not a circuit report of this version ({SCHEMA}).")
    try:
        fields = {key: document[key] for key in _TEXTS}
        fields["circuit"] = circuit_from(document["circuit"])
        n_prompts = len(document["full"])
        for key in _TENSORS:
            values = torch.tensor(document[key], dtype=torch.float32)
            fields[key] = values.reshape(n_prompts, -1) if key.endswith("effects") else values
        for key, kind in _PARTS.items():
            part = document[key]
            fields[key] = None if part is None else kind(**{k: _in(v) for k, v in part.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a whole circuit report: {error}.") from error
    return fields


def _out(value: Any) -> Any:
    """JSON knows no NaN: it is written as null."""
    if isinstance(value, pd.DataFrame):
        columns = value.astype(object).where(value.notna(), None)
        return {"columns": {name: column.tolist() for name, column in columns.items()}}
    return None if isinstance(value, float) and np.isnan(value) else value


def _in(value: Any) -> Any:
    if value is None:
        return np.nan
    if isinstance(value, dict):
        columns = value["columns"].items()
        filled = {n: [np.nan if v is None else v for v in column] for n, column in columns}
        return pd.DataFrame(filled)
    return value
