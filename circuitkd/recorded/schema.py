"""Recorded results as data: one JSON file for each published experiment.

A file says how the experiment was done (models, task, prompts, ablation) and lists its numbers,
each with the tolerance within which a new measurement agrees with it, or with the reason why it
cannot be reproduced.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.tasks import Task, load_task

SCHEMA = "circuitkd-recorded-1"
DATA_DIRECTORY = Path(__file__).parent / "data"

Side = Literal["model", "teacher", "student"]
Quantity = Literal[
    "clean",
    "retained_pct",
    "mean_change_pct",
    "profile_correlation",
    "circuit_retained_pct",
    "leave_one_out_pct",
    "pruned_retained_pct",
    "pruned_heads",
    "pruned_mlps",
    "pruned_overlap_pct",
    "mean_drop_pct",
    "severity",
    "gini",
    "head_similarity",
    "token_cosine",
    "paper_alignment",
]
"""What a line is about; ``docs/reproduce.md`` defines each."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "retained_pct": ("side", "node"),
    "circuit_retained_pct": ("side", "circuit"),
    "leave_one_out_pct": ("side", "circuit", "node"),
    "pruned_overlap_pct": ("side", "circuit"),
    "head_similarity": ("node", "match"),
    "token_cosine": ("node", "match"),
    "paper_alignment": (),
}
_OF_SIDE = ("side",)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Line(_Model):
    """One recorded number.

    Attributes:
        quantity: what it is.
        recorded: its value, in ``unit``.
        low, high: the recorded 95 % interval, where there is one.
        unit: ``logits``, ``%``, ``points`` (differences of percentages), or nothing.
        tolerance: how far from ``recorded`` a measurement may be, in ``unit``.
        reason: instead of a tolerance: why the number cannot be reproduced.
        side: whose it is; ``difference`` is student − teacher, ``per_tenth`` that divided by ten
            times the share of parameters that the student lacks.
        node: the head or MLP that it is about.
        match: the student's component that ``node`` is paired with.
        circuit: the name of the recorded circuit that it is about.
    """

    quantity: Quantity
    recorded: float
    low: float | None = None
    high: float | None = None
    unit: Literal["logits", "%", "points", "heads", "MLPs", ""] = ""
    tolerance: float | None = Field(default=None, ge=0)
    reason: str | None = Field(default=None, min_length=1)
    side: Side | Literal["difference", "per_tenth"] | None = None
    node: str | None = None
    match: str | None = None
    circuit: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Line":
        if (self.tolerance is None) == (self.reason is None):
            raise ValueError("a line has either a tolerance or a reason")
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has both low and high")
        for field in _NEEDS.get(self.quantity, _OF_SIDE):
            if getattr(self, field) is None:
                raise ValueError(f"a line of {self.quantity} needs {field}")
        return self


class Record(_Model):
    """One published experiment: how it was done, and its numbers.

    Attributes:
        name: what ``circuitkd reproduce`` calls it.
        title: one line for people.
        source: where the numbers were recorded.
        models: ``{"model": name}``, or names of ``teacher`` and ``student``.
        task: a shipped task, or a task file beside the record; ``None`` where nothing is measured
            on a model.
        prompts: how many.
        ablation: what replaced a component's output.
        threshold: of node pruning.
        bos: as in ``Task.sample``.
        processed: whether layer norms were folded (see ``load_model``).
        circuits: name -> nodes.
        profiles: side -> node -> percent retained when that node alone is ablated.
        pairs: rows (I_S, I_T, S) of matched components, for ``paper_alignment``.
        parameters: side -> number of parameters, as the source counts them.
        lines: the numbers.
    """

    schema_: Literal["circuitkd-recorded-1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    title: str = Field(min_length=1)
    source: str = Field(min_length=1)
    models: Mapping[Side, str]
    task: str | None = None
    prompts: int = Field(default=0, ge=0)
    ablation: Literal["mean", "zero", "resample"] = "mean"
    threshold: float = 0.2
    bos: str = "none"
    processed: bool = True
    circuits: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    profiles: Mapping[Side, Mapping[str, float]] = Field(default_factory=dict)
    pairs: tuple[tuple[float, float, float], ...] = ()
    parameters: Mapping[Side, float] | None = None
    lines: tuple[Line, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "Record":
        if set(self.models) not in ({"model"}, {"teacher", "student"}):
            raise ValueError("models are either 'model', or 'teacher' and 'student'")
        for line in self.lines:
            if line.circuit is not None and line.circuit not in self.circuits:
                raise ValueError(f"there is no circuit {line.circuit!r} in the file")
            if line.side in ("model", "teacher", "student") and line.side not in self.models:
                raise ValueError(f"a line is about {line.side!r}, which is not among the models")
        for name in self._node_names():
            Node.parse(name)
        return self

    def _node_names(self) -> Iterator[str]:
        for line in self.lines:
            yield from (name for name in (line.node, line.match) if name is not None)
        for names in (*self.circuits.values(), *self.profiles.values()):
            yield from names

    def load_task(self, directory: Path) -> Task | None:
        """The task that was posed; a task file is looked for in ``directory``."""
        if self.task is None:
            return None
        return load_task(directory / self.task if self.task.endswith(".yaml") else self.task)


def record_names() -> tuple[str, ...]:
    """The experiments that ship with circuitkd.

    >>> "gpt2-numerals" in record_names()
    True
    """
    return tuple(sorted(path.stem for path in DATA_DIRECTORY.glob("*.json")))


def shipped_record(name: str) -> Record:
    """A record that ships with circuitkd.

    Raises:
        InputError: there is none of this name.

    >>> shipped_record("gpt2-numerals").models["model"]
    'gpt2'
    """
    if name not in record_names():
        close = difflib.get_close_matches(name, record_names(), n=1, cutoff=0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"There are no recorded results {name!r}.{hint} There are: {', '.join(record_names())}."
        )
    return read_record(DATA_DIRECTORY / f"{name}.json")


def read_record(path: str | Path) -> Record:
    """The record in a file.

    Raises:
        InputError: it cannot be read, has another schema, or a field is wrong.

    >>> read_record(DATA_DIRECTORY / "gpt2-numerals.json").prompts
    1536
    """
    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"The recorded results {path} cannot be read: {error}.") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path} has the schema {schema!r}; circuitkd reads recorded results of {SCHEMA!r}."
        )
    try:
        return Record.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{path}, field {field}: {message}.") from error
