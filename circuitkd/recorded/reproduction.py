"""``reproduce``: measure what was published once more, and say line by line whether it agrees.

The published procedure, with circuitkd's own functions. What differs from it, and how wide the
tolerances are, is in ``docs/reproduce.md``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.compare._loading import ModelLike, Progress, load_with_progress
from circuitkd.errors import InputError
from circuitkd.models import model_label
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts
from circuitkd.recorded.arithmetic import Arithmetic
from circuitkd.recorded.bench import Bench
from circuitkd.recorded.measured import Measured, pooled
from circuitkd.recorded.schema import (
    DATA_DIRECTORY,
    Line,
    Record,
    read_record,
    record_names,
    shipped_record,
)
from circuitkd.runs import versions, write_atomically
from circuitkd.tasks import Task

__all__ = ["Compared", "Reproduction", "Verdict", "record_names", "reproduce", "shipped_record"]

Verdict = Literal["agrees", "differs", "not reproducible"]
VERDICTS: tuple[Verdict, ...] = ("agrees", "differs", "not reproducible")
MINIMUM_PROMPTS = 8
SCHEMA = "circuitkd-reproduction-1"

_WORDS = {
    "clean": "clean metric",
    "retained_pct": "without {node}",
    "mean_change_pct": "mean change by a head",
    "profile_correlation": "correlation over all nodes",
    "circuit_retained_pct": "circuit {circuit}",
    "leave_one_out_pct": "{circuit} without {node}",
    "pruned_retained_pct": "pruned anew, retained",
    "pruned_heads": "pruned anew, heads",
    "pruned_mlps": "pruned anew, MLPs",
    "pruned_overlap_pct": "pruned anew, shared with {circuit}",
    "mean_drop_pct": "mean drop",
    "severity": "severity",
    "gini": "Gini of drops",
    "head_similarity": "T {node}, S {match}: similarity",
    "token_cosine": "T {node}, S {match}: cosine",
    "paper_alignment": "published alignment",
}
_SIDES = {"difference": "student − teacher", "per_tenth": "per tenth of C"}


@dataclass(frozen=True)
class Compared:
    """One recorded number beside the measured one.

    ``verdict``: ``agrees`` where the recorded number lies within ``line.tolerance`` of the measured
    interval over prompts (of the value, where no prompts were drawn); ``because`` says why there is
    none. A number that cannot be reproduced may still have a measured one beside it.
    """

    line: Line
    measured: Measured

    @property
    def label(self) -> str:
        """What the number is, in words."""
        node, match = (
            None if name is None else Node.parse(name).label
            for name in (self.line.node, self.line.match)
        )
        return _WORDS[self.line.quantity].format(node=node, match=match, circuit=self.line.circuit)

    @property
    def side(self) -> str:
        """Whose the number is, in words."""
        return _SIDES.get(str(self.line.side), self.line.side or "pair")

    @property
    def verdict(self) -> Verdict:
        if self.line.tolerance is None or self.because is not None:
            return "not reproducible"
        near = self.measured.distance(self.line.recorded) <= self.line.tolerance
        return "agrees" if near else "differs"

    @property
    def because(self) -> str | None:
        """Why the number cannot be reproduced; ``None`` where it can."""
        return self.line.reason or self.measured.missing

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is missing is ``None``."""
        value = self.measured.value
        return {
            "label": self.label,
            **self.line.model_dump(mode="json"),
            "measured": value if isfinite(value) else None,
            "measured_low": self.measured.low,
            "measured_high": self.measured.high,
            "missing": self.measured.missing,
            "exact": self.measured.exact,
            "verdict": self.verdict,
            "because": self.because,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Compared":
        """What ``to_json`` gave."""
        value = float("nan") if row["measured"] is None else row["measured"]
        return cls(
            Line.model_validate({name: row[name] for name in Line.model_fields}),
            Measured(
                value, row["measured_low"], row["measured_high"], row["missing"], row["exact"]
            ),
        )


@dataclass(frozen=True)
class Reproduction:
    """A published experiment, measured again.

    ``config`` holds what the numbers depend on: models, task, prompts, seed, ablation, threshold,
    bos, processed, dtype.
    """

    name: str
    title: str
    source: str
    lines: tuple[Compared, ...]
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> number of lines."""
        found = [line.verdict for line in self.lines]
        return {verdict: found.count(verdict) for verdict in VERDICTS}

    @property
    def frame(self) -> pd.DataFrame:
        """One row a line: label, recorded, measured, measured_low, measured_high, unit, tolerance,
        verdict, because, and what the line is about.
        """
        return pd.DataFrame([line.to_json() for line in self.lines])

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        rest = {key: value for key, value in vars(self).items() if key != "lines"}
        return {
            "schema": SCHEMA,
            **rest,
            "counts": self.counts,
            "lines": [line.to_json() for line in self.lines],
        }

    def save(self, path: str | Path) -> None:
        """Write one JSON file; it appears whole or not at all."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        write_atomically(Path(path), text.encode())

    @classmethod
    def load(cls, path: str | Path) -> "Reproduction":
        """Read what ``save`` wrote."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}.") from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise InputError(f"{path} is no reproduction that circuitkd can read.")
        rest = {key: document[key] for key in ("name", "title", "source", "config", "versions")}
        return cls(lines=tuple(map(Compared.from_json, document["lines"])), **rest)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        rows = (
            f"  {line.side}, {line.label}: recorded {line.line.recorded:.4g}, measured "
            f"{line.measured.value:.4g} {line.line.unit}".rstrip()
            + f", {line.verdict}"
            for line in self.lines
        )
        return "\n".join([f"{self.name}: {counts}", *rows])


def reproduce(
    record: str | Path,
    *,
    models: Mapping[str, ModelLike] | None = None,
    n: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Reproduction:
    """Measure a published experiment again, and compare it with what was recorded.

    Args:
        record: a name out of ``record_names()``, or a file of recorded results (``Record``).
        models: other models for ``"model"``, or ``"teacher"`` and ``"student"``.
        n: other than the published number of prompts.
        seed: of the prompts, which are not the published ones.
        batch_size: prompts that go through a model at once.
        device: where models given by name run.
        dtype: of the weights of models given by name.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        InputError: no such record, an unreadable one, a side that it does not have, too few
            prompts; a model that is not there.

    >>> result = reproduce("arithmetic")
    >>> result.counts["agrees"], result.counts["differs"]
    (9, 0)
    """
    given, directory = _record(record)
    names = _models(given, models or {})
    n = given.prompts if n is None else n
    task = given.load_task(directory)
    if task is not None and n < MINIMUM_PROMPTS:
        raise InputError(f"n={n} is too few prompts for an interval: take at least 8.")
    if task is None:
        measure, labels = Arithmetic(given).measure, {}
    else:
        load = {"device": device, "dtype": dtype, "processed": given.processed}
        loaded = {side: load_with_progress(own, progress, **load) for side, own in names.items()}
        prompts = _prompts(task, loaded, n, seed, given.bos)
        bench = Bench(given, loaded, prompts, batch_size=batch_size, progress=progress)
        measure, labels = bench.measure, {side: model_label(own) for side, own in loaded.items()}
    return Reproduction(
        name=given.name,
        title=given.title,
        source=given.source,
        lines=tuple(Compared(line, measure(line)) for line in given.lines),
        config={
            "models": labels,
            "task": given.task,
            "prompts": n if task is not None else 0,
            "published_prompts": given.prompts,
            "seed": seed,
            "ablation": given.ablation,
            "threshold": given.threshold,
            "bos": given.bos,
            "processed": given.processed,
            "dtype": dtype,
        },
        versions=versions(),
    )


def _record(record: str | Path) -> tuple[Record, Path]:
    """The record, and the directory that it names task files in."""
    if isinstance(record, Path) or record.endswith(".json"):
        return read_record(record), Path(record).parent
    return shipped_record(record), DATA_DIRECTORY


def _models(record: Record, given: Mapping[str, ModelLike]) -> dict[str, ModelLike]:
    unknown = [side for side in given if side not in record.models]
    if unknown:
        raise InputError(
            f"{record.name} is about {' and '.join(record.models)}: it has no {unknown[0]} to "
            "replace."
        )
    return {side: given.get(side, name) for side, name in record.models.items()}


def _prompts(
    task: Task, models: Mapping[str, TransformerBridge], n: int, seed: int, bos: str
) -> dict[str, Prompts]:
    """The same prompts for every side, templates joined as in the published procedure."""
    if len(models) == 1:
        (model,) = models.values()
        sides = (task.sample(model, n, seed, bos=bos),)
    else:
        sides = task.sample_pair(models["teacher"], models["student"], n, seed, bos=bos)
    return dict(zip(models, pooled(sides), strict=True))
