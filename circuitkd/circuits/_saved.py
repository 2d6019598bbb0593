"""Results as single safetensors files: numbers inside, everything else in the header."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from circuitkd.errors import InputError
from circuitkd.runs import write_atomically


def write_numbers(
    path: str | Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file that appears whole or not at all."""
    header = {key: json.dumps(value) for key, value in about.items()}
    whole = {key: value.contiguous() for key, value in tensors.items()}
    write_atomically(Path(path), save(whole, metadata=header))


@contextmanager
def opened_numbers(
    path: str | Path, kind: str
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """What is in a file: texts and tensors. ``InputError`` where they do not make a ``kind``."""
    if not Path(path).is_file():
        raise InputError(f"There is no saved result at {str(path)!r}.")
    try:
        with safe_open(path, framework="pt") as file:
            about = {key: json.loads(text) for key, text in (file.metadata() or {}).items()}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path} is damaged, or no saved result: {error}.") from error
    try:
        yield about, tensors
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} does not hold {kind}.") from error
