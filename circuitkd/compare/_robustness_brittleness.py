"""How much a model loses when one of its components is ablated, and teacher against student."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from circuitkd.circuits.influence_result import Influence
from circuitkd.compare import _robustness_files as files
from circuitkd.compare._robustness_statistics import (
    ALPHA,
    LIMIT,
    THRESHOLD,
    Statistic,
    basic_interval,
    component_difference,
    component_interval,
    drop_statistics,
    mean_drop,
)
from circuitkd.errors import InputError
from circuitkd.metrics import bootstrap_means

_PERCENT = "mean_drop_pct"
_RANGES = {"mean_drop_pct": 100.0, "worst_drop_pct": 100.0, "severity": 1.0, "gini": 1.0}
_INTERVALS = ("components_low", "components_high", "prompts_low", "prompts_high")
_PROMPT_DRAWS = 2000


@dataclass(frozen=True)
class Brittleness:
    """What ablating one component at a time takes from one model.

    A drop is what the metric loses, clamped at 0: a component whose ablation helps counts as none.
    In percent it is also clamped at 100. A model that does not do the task (``competent`` False)
    has no percentages (NaN), only ``mean_drop`` in the metric's unit.

    Attributes:
        frame: one row a component: node, kind, layer, head, drop (in ``unit``), drop_pct.
        statistics: one row each for ``mean_drop_pct``, ``total_drop_pct`` (the sum: unlike the
            mean it does not fall because a model has more components), ``worst_drop_pct`` (mean of
            the worst 5 %), ``severity`` (tail score in [0, 1]), ``gini`` (of the drops) and
            ``mean_drop``; columns unit, value, and two 95 % intervals: ``components_low``/``_high``
            as published, and ``prompts_low``/``_high`` by basic bootstrap.
    """

    model: str
    task: str
    variant: str | None
    ablation: str
    unit: str
    prompts: int
    clean: float
    competent: bool
    frame: pd.DataFrame
    statistics: pd.DataFrame

    @property
    def mean_drop(self) -> float:
        """Mean drop over all heads and MLPs in percent; NaN where the model is not competent."""
        return float(self.statistics.loc[_PERCENT, "value"])

    @property
    def severity(self) -> float:
        """The severity tail score in [0, 1]; NaN where the model is not competent."""
        return float(self.statistics.loc["severity", "value"])

    def save(self, path: str | Path) -> None:
        """Write one JSON file."""
        files.write(path, "brittleness", vars(self))

    @classmethod
    def load(cls, path: str | Path) -> "Brittleness":
        """Read what ``save`` wrote."""
        return cls(**files.read(path, "brittleness"))

    def __repr__(self) -> str:
        rows = self.statistics.loc[_shown(self.statistics)]
        lines = [
            f"Brittleness of {self.model} on {_task(self)}: {self.ablation} ablation of "
            f"{len(self.frame)} components, one at a time, {self.prompts} prompts",
            *(
                f"  {_words(name)} {_with_unit(row['value'], row['unit'])}, over prompts "
                f"[{row['prompts_low']:.3g}, {row['prompts_high']:.3g}], over components "
                f"[{row['components_low']:.3g}, {row['components_high']:.3g}]"
                for name, row in rows.iterrows()
            ),
        ]
        if not self.competent:
            lines.append("  the model does not do this task: percentages are withheld")
        return "\n".join(lines)


@dataclass(frozen=True)
class PairedBrittleness:
    """Brittleness of a teacher and its student, and their difference.

    Attributes:
        teacher, student: each model alone.
        parameters: number of parameters of ``"teacher"`` and ``"student"``, or ``None``.
        frame: indexed like ``statistics`` of each model; columns unit, teacher, student,
            ``difference`` (student − teacher: positive where the student is more brittle), its 95 %
            intervals over components and over prompts, and ``components_mean``, the mean of the
            resampled differences, which the published code takes for the difference. Prompts are
            drawn together for both models.
    """

    teacher: Brittleness
    student: Brittleness
    parameters: Mapping[str, int] | None
    frame: pd.DataFrame

    @property
    def compression(self) -> float | None:
        """C = (P_T − P_S) / P_T; ``None`` where parameters are unknown or not fewer."""
        if self.parameters is None:
            return None
        teacher, student = self.parameters["teacher"], self.parameters["student"]
        return (teacher - student) / teacher if student < teacher else None

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """Every difference, and its intervals, divided by the compression C; NaN without one.

        Columns: unit, slope (a full unit of C), the intervals, ``per_tenth`` (a tenth of C), and
        ``components_mean``, whose tenth is what is published as brittleness per 0.1 C.
        """
        frame = self.frame.drop(columns=["teacher", "student"]).rename(
            columns={"difference": "slope"}
        )
        numbers = frame.columns.drop("unit")
        frame[numbers] /= np.nan if self.compression is None else self.compression
        frame.insert(2, "per_tenth", frame["slope"] / 10)
        return frame

    def save(self, path: str | Path) -> None:
        """Write one JSON file."""
        sides = {side: vars(getattr(self, side)) for side in ("teacher", "student")}
        rest = {"parameters": self.parameters, "frame": self.frame}
        files.write(path, "paired-brittleness", {**sides, **rest})

    @classmethod
    def load(cls, path: str | Path) -> "PairedBrittleness":
        """Read what ``save`` wrote."""
        fields: dict[str, Any] = files.read(path, "paired-brittleness")
        sides = {side: Brittleness(**fields.pop(side)) for side in ("teacher", "student")}
        return cls(**sides, **fields)

    def __repr__(self) -> str:
        lines = [f"Brittleness of {self.student.model} against {self.teacher.model}"]
        lines += [
            f"  {_words(name)} {row['teacher']:.3g} → {_with_unit(row['student'], row['unit'])}, "
            f"difference {row['difference']:+.3g} over prompts "
            f"[{row['prompts_low']:+.3g}, {row['prompts_high']:+.3g}]"
            for name, row in self.frame.loc[_shown(self.frame)].iterrows()
        ]
        if self.compression is not None and np.isfinite(self.slopes.loc[_PERCENT, "slope"]):
            slope = self.slopes.loc[_PERCENT]
            lines.append(
                f"  the student has {self.compression:.1%} fewer parameters: "
                f"{slope['per_tenth']:+.3g} points of mean drop for each tenth"
            )
        lines += [
            f"  {side.model} does not do this task: its percentages are withheld"
            for side in (self.teacher, self.student)
            if not side.competent
        ]
        return "\n".join(lines)


def ablation_brittleness(
    influence: Influence,
    *,
    limit: float = LIMIT,
    threshold: float = THRESHOLD,
    alpha: float = ALPHA,
) -> Brittleness:
    """How brittle one model is under the ablation of single components.

    Args:
        influence: from ``node_influence``; all its heads and MLPs are pooled with equal weight.
        limit: L of the severity tail (see ``severity_tail``), in percent.
        threshold: T likewise: drops below it are not severe.
        alpha: exponent of the severity tail.

    Raises:
        InputError: impossible parameters of the severity tail.

    Source: Distilled Circuits, robustness; published for GPT-2 and DistilGPT2 on numerals: 3.06 %
    and 12.24 %.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> ablation_brittleness(ckd.node_influence(student, prompts)).mean_drop > 10
    True
    """
    percent = drop_statistics(limit, threshold, alpha)
    measured = _measured(influence, percent)
    ordered = _published_order(influence)
    components = component_interval(measured.drop[ordered], {"mean_drop": mean_drop})
    if influence.competent:
        components |= component_interval(measured.drop_pct[ordered], percent)
    rows = {
        name: {
            "unit": unit,
            "value": measured.value[name],
            **dict(zip(_INTERVALS[:2], components.get(name, (np.nan, np.nan)), strict=True)),
            **dict(zip(_INTERVALS[2:], measured.interval(name), strict=True)),
        }
        for name, unit in _units(influence).items()
    }
    return Brittleness(
        model=influence.model,
        task=influence.task,
        variant=influence.variant,
        ablation=influence.ablation,
        unit=influence.unit,
        prompts=len(influence.clean),
        clean=float(influence.clean.double().mean()),
        competent=influence.competent,
        frame=pd.DataFrame(
            {
                "node": [node.name for node in influence.nodes],
                "kind": [node.kind for node in influence.nodes],
                "layer": [node.layer for node in influence.nodes],
                "head": pd.array([node.head for node in influence.nodes], dtype="Int64"),
                "drop": measured.drop,
                "drop_pct": measured.drop_pct,
            }
        ),
        statistics=pd.DataFrame.from_dict(rows, orient="index"),
    )


def brittleness_of(
    influences: Mapping[str, Influence],
    parameters: Mapping[str, int] | None = None,
    *,
    limit: float = LIMIT,
    threshold: float = THRESHOLD,
    alpha: float = ALPHA,
) -> PairedBrittleness:
    """Brittleness of a teacher and its student, their difference, and its slope over compression.

    Args:
        influences: of ``"teacher"`` and ``"student"``, measured on the same prompts.
        parameters: number of parameters of each (see ``parameter_count``), for the compression
            ratio; without it there are no slopes.
        limit: see ``ablation_brittleness``.
        threshold: likewise.
        alpha: likewise.

    Raises:
        InputError: different numbers of prompts, other tasks or ablations, a side is missing.

    >>> import circuitkd as ckd
    >>> models = ckd.load_model("tiny-teacher"), ckd.load_model("tiny-student")
    >>> both = ckd.load_task("weekdays").sample_pair(*models, n=8, seed=0)
    >>> influences = [ckd.node_influence(*own) for own in zip(models, both, strict=True)]
    >>> pair = brittleness_of({"teacher": influences[0], "student": influences[1]})
    >>> pair.student.mean_drop > pair.teacher.mean_drop
    True
    """
    teacher, student = require_same_prompts(influences)
    if parameters is not None and set(parameters) != {"teacher", "student"}:
        raise InputError(f"Parameters of 'teacher' and 'student' are needed, not {[*parameters]}.")
    percent = drop_statistics(limit, threshold, alpha)
    sides = {
        side: ablation_brittleness(own, limit=limit, threshold=threshold, alpha=alpha)
        for side, own in influences.items()
    }
    return PairedBrittleness(
        teacher=sides["teacher"],
        student=sides["student"],
        parameters=None if parameters is None else dict(parameters),
        frame=_differences(teacher, student, percent),
    )


def require_same_prompts(influences: Mapping[str, Influence]) -> tuple[Influence, Influence]:
    """The teacher's and the student's influence; ``InputError`` unless they can be compared."""
    if set(influences) != {"teacher", "student"}:
        raise InputError(f"Influences of 'teacher' and 'student' are needed, not {[*influences]}.")
    teacher, student = influences["teacher"], influences["student"]
    for what in ("task", "variant", "ablation", "metric"):
        one, other = getattr(teacher, what), getattr(student, what)
        if one != other:
            raise InputError(f"The two influences differ in their {what}: {one} and {other}.")
    if len(teacher.clean) != len(student.clean):
        raise InputError(
            f"The two influences are of {len(teacher.clean)} and {len(student.clean)} prompts; "
            "measure both on the pair that task.sample_pair returns."
        )
    return teacher, student


def _differences(
    teacher: Influence, student: Influence, percent: Mapping[str, Statistic]
) -> pd.DataFrame:
    left, right = (_measured(influence, percent) for influence in (teacher, student))
    first, second = _published_order(teacher), _published_order(student)
    components = component_difference(
        left.drop[first], right.drop[second], {"mean_drop": mean_drop}
    )
    if teacher.competent and student.competent:
        drops = left.drop_pct[first], right.drop_pct[second]
        components |= component_difference(*drops, percent)
    rows = {}
    for name, unit in _units(teacher).items():
        difference = right.value[name] - left.value[name]
        mean, *ends = components.get(name, (np.nan, np.nan, np.nan))
        over_prompts = basic_interval(difference, right.draws[name] - left.draws[name])
        rows[name] = {
            "unit": unit,
            "teacher": left.value[name],
            "student": right.value[name],
            "difference": difference,
            **dict(zip(_INTERVALS, (*ends, *over_prompts), strict=True)),
            "components_mean": mean,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


@dataclass(frozen=True)
class _Measured:
    """The drops of one model, the statistics of them, and the same in bootstrap draws."""

    drop: Float[np.ndarray, "node"]
    drop_pct: Float[np.ndarray, "node"]
    value: dict[str, float]
    draws: dict[str, Float[np.ndarray, "draw"]]

    def interval(self, name: str) -> tuple[float, float]:
        return basic_interval(self.value[name], self.draws[name], 0.0, _RANGES.get(name, np.inf))


def _measured(influence: Influence, percent: Mapping[str, Statistic]) -> _Measured:
    """Every model of a pair draws the same prompts, because the seed is always the same."""
    effects, clean = influence.effects.double().numpy(), influence.clean.double().numpy()
    drawn = bootstrap_means(np.column_stack([effects, clean]), draws=_PROMPT_DRAWS)
    drop = np.maximum(0, -effects.mean(0))
    mean = {"mean_drop": float(drop.mean())}
    mean_draws = {"mean_drop": np.maximum(0, -drawn[:, :-1]).mean(1)}
    if not influence.competent:
        nothing = np.full(len(drawn), np.nan)
        value, draws = dict.fromkeys(percent, np.nan), dict.fromkeys(percent, nothing)
        return _Measured(drop, np.full_like(drop, np.nan), value | mean, draws | mean_draws)
    drop_pct = np.clip(-100 * effects.mean(0) / clean.mean(), 0, 100)
    # Of prompts that the model fails on average, no share can be lost.
    baseline = np.where(drawn[:, -1:] > 0, drawn[:, -1:], np.nan)
    drawn_pct = np.clip(-100 * drawn[:, :-1] / baseline, 0, 100)
    value = {name: float(statistic(drop_pct)) for name, statistic in percent.items()}
    draws = {name: statistic(drawn_pct) for name, statistic in percent.items()}
    return _Measured(drop, drop_pct, value | mean, draws | mean_draws)


def _units(influence: Influence) -> dict[str, str]:
    percent = dict.fromkeys(("mean_drop_pct", "total_drop_pct", "worst_drop_pct"), "%")
    return {**percent, "severity": "", "gini": "", "mean_drop": influence.unit}


def _published_order(influence: Influence) -> list[int]:
    """Places of all heads, then of all MLPs; the published intervals depend on this order."""
    kinds = [node.kind for node in influence.nodes]
    return sorted(range(len(kinds)), key=lambda place: kinds[place] != "head")


def _shown(statistics: pd.DataFrame) -> list[str]:
    """Statistics with a value for at least one model, the Gini coefficient left to the table."""
    known = statistics.drop(columns="unit").dropna(how="all").index
    return [str(name) for name in known if name != "gini"]


def _words(name: str) -> str:
    return name.removesuffix("_pct").replace("_", " ")


def _with_unit(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip()


def _task(result: Brittleness) -> str:
    return f"{result.task} ({result.variant})" if result.variant else result.task
