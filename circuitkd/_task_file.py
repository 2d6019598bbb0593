"""Reading a task file, so that every fault has a line, a field and what is allowed there."""

import difflib
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from circuitkd._task_schema import LocatedError, Location, say
from circuitkd.errors import TaskError

Spec = TypeVar("Spec", bound=BaseModel)


def read_task_file(path: Path, model: type[Spec]) -> Spec:
    """The task in ``path``, validated as ``model``.

    Raises ``TaskError`` naming the file, the line, the field and what is allowed there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"Cannot read the task file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not a text file in UTF-8; a task file is YAML.") from error
    node, data = _parse(path, text)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A misspelt field is also a missing one; the misspelling is the better news.
        found = error.errors(include_url=False)
        details = min(found, key=lambda each: each["type"] != "extra_forbidden")
        location = _location(details)
        line, shown = _place(node, location)
        raise TaskError(
            f"{path}, line {line}, field {_field(shown)}: {_message(details, location, model)}."
        ) from error


def _parse(path: Path, text: str) -> tuple[yaml.Node, Any]:
    # BaseLoader is the safe loader without guesses: it reads 01, no and 5 as the words they are.
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        data = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 (it builds text, lists, maps)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise TaskError(f"{path}{line}: this is not YAML ({problem}).") from error
    if not isinstance(node, yaml.MappingNode):
        raise TaskError(f"{path}, line 1: a task file is a YAML mapping of fields to values.")
    _refuse_duplicates(path, node)
    return node, data


def _refuse_duplicates(path: Path, root: yaml.Node) -> None:
    # Aliases may repeat a node, many times over or inside itself: each is looked at once.
    waiting: list[tuple[yaml.Node, Location]] = [(root, ())]
    visited: set[int] = set()
    while waiting:
        node, location = waiting.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(value, (*location, index)) for index, value in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                here = (*location, str(key.value))
                if here[-1] in keys:
                    raise TaskError(
                        f"{path}, line {key.start_mark.line + 1}, field {_field(here)}: it is "
                        "given twice; allowed: once."
                    )
                keys.add(here[-1])
                waiting.append((value, here))


def _location(details: ErrorDetails) -> Location:
    location = tuple(part for part in details["loc"] if part != "[key]")
    error = details.get("ctx", {}).get("error")
    return (*location, *error.location) if isinstance(error, LocatedError) else location


def _place(node: yaml.Node, location: Location) -> tuple[int, Location]:
    """The line of the deepest part of ``location`` that the file has, and its path in the file.

    The two differ where the file is shorter than the model: a list of words stands for
    ``{words: [...]}``, and a template's text for ``{text: ...}``.
    """
    line, shown = node.start_mark.line, []
    for part in location:
        if isinstance(node, yaml.MappingNode):
            shown.append(part)
            for key, value in node.value:
                if key.value == str(part):
                    line, node = key.start_mark.line, value
                    break
        elif isinstance(node, yaml.SequenceNode) and part in range(len(node.value)):
            shown.append(part)
            node = node.value[int(part)]
            line = node.start_mark.line
    return line + 1, tuple(shown)


def _field(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "(whole file)"


def _message(details: ErrorDetails, location: Location, model: type[BaseModel]) -> str:
    kind = details["type"]
    error = details.get("ctx", {}).get("error")
    if isinstance(error, LocatedError):
        return str(error)
    if kind == "extra_forbidden":
        allowed = _fields_at(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"there is no such field{hint}; allowed: {say(allowed)}"
    if kind == "missing":
        return "it is missing; allowed: any task has this field"
    return details["msg"].replace("Input should", "it must") + f"; found {details['input']!r}"


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """The fields (by their names in YAML) of the model found at ``location``."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            fields = {info.alias or name: info for name, info in current.model_fields.items()}
            if part in fields:
                current = fields[str(part)].annotation
            continue
        current = _inner(current)
    current = _inner(current)
    if not (isinstance(current, type) and issubclass(current, BaseModel)):
        return ["nothing here"]
    return [info.alias or name for name, info in current.model_fields.items()]


def _inner(annotation: Any) -> Any:
    """The model inside ``Mapping[str, Annotated[M, ...]]``, ``tuple[M, ...]``, ``M | None``."""
    while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        parts = [part for part in get_args(annotation) if part not in (str, type(None), Ellipsis)]
        if not parts:
            return annotation
        annotation = parts[0]
    return annotation
