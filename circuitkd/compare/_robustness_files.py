"""Results as JSON files: plain values, mappings, and data frames. NaN is written as null."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from circuitkd.errors import InputError
from circuitkd.runs import write_atomically


def write(path: str | Path, kind: str, fields: Mapping[str, Any]) -> None:
    """Write the fields of a result of this kind; the file appears whole or not at all."""
    document = {"schema": _schema(kind), **{key: plain(value) for key, value in fields.items()}}
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomically(Path(path), text.encode())


def read(path: str | Path, kind: str) -> dict[str, Any]:
    """The fields that ``write`` was given; raises ``InputError`` where there are none."""
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    if not isinstance(document, dict) or document.pop("schema", None) != _schema(kind):
        raise InputError(f"{path} is no {kind.replace('-', ' ')} that circuitkd can read.")
    return {key: _restored(value) for key, value in document.items()}


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it.

    >>> plain({"x": np.nan, "y": (1, np.float64(2.0))})
    {'x': None, 'y': [1, 2.0]}
    """
    if isinstance(value, pd.DataFrame):
        columns = {
            str(name): {"dtype": str(column.dtype), "values": plain(column.tolist())}
            for name, column in value.items()
        }
        return {"index": plain(value.index.tolist()), "columns": columns}
    if isinstance(value, Mapping):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [plain(own) for own in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if value is pd.NA or value != value else value


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) != {"index", "columns"}:
        return {key: _restored(own) for key, own in value.items()}
    columns = {
        name: pd.array(column["values"], dtype=column["dtype"])
        if column["dtype"] == "Int64"
        else pd.Series(column["values"], index=value["index"], dtype=column["dtype"])
        for name, column in value["columns"].items()
    }
    return pd.DataFrame(columns, index=value["index"])


def _schema(kind: str) -> str:
    return f"circuitkd.{kind}/1"
