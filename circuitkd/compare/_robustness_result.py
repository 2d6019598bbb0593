"""``Robustness``: what two models answer under each condition, and what ablation costs them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from circuitkd.circuits.influence_result import Influence
from circuitkd.compare import _robustness_files as files
from circuitkd.compare._robustness_brittleness import PairedBrittleness, brittleness_of
from circuitkd.compare._robustness_inputs import CLEAN, Condition
from circuitkd.errors import InputError
from circuitkd.metrics import (
    UNITS,
    accuracy,
    accuracy_interval,
    bootstrap_weights,
    percentile_interval,
)
from circuitkd.nodes import Node
from circuitkd.runs import versions, write_atomically

_TEXTS, _NUMBERS = "robustness.json", "robustness.safetensors"
_KIND = "robustness"
_ABOUT_INFLUENCE = ("model", "task", "variant", "bos", "ablation", "metric")
_SIDES = ("teacher", "student")
_DRAWS = 2000


@dataclass(frozen=True)
class Robustness:
    """A teacher and its student under perturbed inputs, and under ablation.

    The first condition is the task as it is. A variant asks other prompts; noise keeps the prompts
    and adds to each entry of each token's embedding a normal draw with a standard deviation of
    ``strength`` times the root mean square of the prompts' token embeddings of that model.

    Attributes:
        conditions: what the inputs were.
        metrics: of ``"teacher"`` and ``"student"``: the metric [condition, prompt].
        tops: likewise the token that the model finds likeliest after the prompt; ``None`` where
            the two have different vocabularies.
        influences: behind the brittleness; ``None`` where nothing was ablated.
        parameters: number of parameters of each model; ``None`` where nobody counted them.
        warnings: what a reader of the numbers must know, in words.
        config: the arguments it was made with.
        versions: of circuitkd and what it builds on.
    """

    task: str
    metric: str
    conditions: tuple[Condition, ...]
    metrics: Mapping[str, Float[Tensor, "condition prompt"]]
    tops: Mapping[str, Int[Tensor, "condition prompt"]] | None
    influences: Mapping[str, Influence] | None
    parameters: Mapping[str, int] | None
    warnings: tuple[str, ...]
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def unit(self) -> str:
        """Unit of the metric: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def brittleness(self) -> PairedBrittleness | None:
        """What single ablations cost each model; ``None`` where nothing was ablated."""
        if self.influences is None:
            return None
        return brittleness_of(self.influences, self.parameters)

    @cached_property
    def competent(self) -> dict[str, bool]:
        """Which models do the task as it is: the interval of the clean metric lies above 0."""
        return {side: self._interval(side, 0)[0] > 0 for side in _SIDES}

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each model and condition.

        Columns: side, model, kind, condition, strength (NaN for variants), accuracy with its Wilson
        interval, metric with its bootstrap interval over prompts (``_low``, ``_high``), and
        ``retained_pct``, the metric in percent of the clean one with its bootstrap interval:
        withheld (NaN) where the model does not do the task as it is.
        """
        rows = []
        for side in _SIDES:
            for place, condition in enumerate(self.conditions):
                values = self.metrics[side][place]
                sure, about = accuracy_interval(values), self._interval(side, place)
                kept, draws = self._retained(side, place)
                rows.append(
                    {
                        "side": side,
                        "model": self.config[side],
                        **_named(condition),
                        "accuracy": accuracy(values),
                        **_ends("accuracy", sure),
                        "metric": float(values.double().mean()),
                        **_ends("metric", about),
                        "retained_pct": kept,
                        **_ends("retained", _percentiles(draws)),
                    }
                )
        return pd.DataFrame(rows)

    @cached_property
    def agreement(self) -> pd.DataFrame:
        """One row for each condition: how far the student follows its teacher.

        Columns: kind, condition, strength; ``agreement``, the share of prompts on which both prefer
        the same of the two answers (both right, or both wrong), with its Wilson interval;
        ``expected``, what two models of these accuracies would agree on if they erred
        independently; ``same_token``, the share on which both find the same token likeliest (NaN
        where the vocabularies differ), with its interval; ``gap_pct``, student − teacher in
        ``retained_pct``, in percentage points, with its bootstrap interval (prompts drawn together
        for both): negative where the student loses more.
        """
        rows = []
        for place, condition in enumerate(self.conditions):
            right = [self.metrics[side][place] > 0 for side in _SIDES]
            p, q = (float(own.double().mean()) for own in right)
            same = (right[0] == right[1]).float()
            (left, left_draws), (kept, draws) = (self._retained(side, place) for side in _SIDES)
            rows.append(
                {
                    **_named(condition),
                    "agreement": float(same.double().mean()),
                    **_ends("agreement", accuracy_interval(same)),
                    "expected": p * q + (1 - p) * (1 - q),
                    **self._same_token(place),
                    "gap_pct": kept - left,
                    **_ends("gap", _percentiles(draws - left_draws)),
                }
            )
        return pd.DataFrame(rows)

    def _same_token(self, place: int) -> dict[str, float]:
        if self.tops is None:
            return {"same_token": np.nan, **_ends("same_token", (np.nan, np.nan))}
        same = (self.tops["teacher"][place] == self.tops["student"][place]).float()
        share = float(same.double().mean())
        return {"same_token": share, **_ends("same_token", accuracy_interval(same))}

    @cached_property
    def _means(self) -> dict[str, Float[np.ndarray, "condition draw"]]:
        """The mean metric of each condition in bootstrap draws over prompts, for each model.

        Noise is put on the clean prompts, so the two are drawn together; a variant's prompts are
        others, and are drawn on their own. Both models always draw the same prompts.
        """
        n = self.metrics["teacher"].shape[1]
        means = {side: np.empty((len(self.conditions), _DRAWS)) for side in _SIDES}
        shared = bootstrap_weights(n, _DRAWS, seed=0) / n
        for place, condition in enumerate(self.conditions):
            own = condition.kind == "variant"
            weights = bootstrap_weights(n, _DRAWS, seed=place) / n if own else shared
            for side in _SIDES:
                means[side][place] = weights @ self.metrics[side][place].double().numpy()
        return means

    def _interval(self, side: str, place: int) -> tuple[float, float]:
        """95 % interval of the mean metric."""
        return _percentiles(self._means[side][place])

    def _retained(self, side: str, place: int) -> tuple[float, Float[np.ndarray, "draw"]]:
        """The metric in percent of the clean one, and the same in bootstrap draws."""
        if not self.competent[side]:
            return np.nan, np.full(_DRAWS, np.nan)
        clean, here = (self.metrics[side][k].double().mean() for k in (0, place))
        baseline = self._means[side][0]
        draws = 100 * self._means[side][place] / np.where(baseline > 0, baseline, np.nan)
        return float(100 * here / clean), draws

    def competence_notes(self) -> list[str]:
        """A sentence for each model that does not do the task as it is."""
        return [
            f"The {side} {self.config[side]} does not do this task: its mean metric is not above "
            "0, so no percentages of it are given."
            for side in _SIDES
            if not self.competent[side]
        ]

    def with_warnings(self, notes: list[str]) -> "Robustness":
        """The same with further warnings."""
        return replace(self, warnings=(*self.warnings, *notes))

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``: what ``circuitkd robustness --json`` prints."""
        pair = self.brittleness
        return {
            "task": self.task,
            "metric": self.metric,
            "unit": self.unit,
            "behaviour": _records(self.frame),
            "agreement": _records(self.agreement),
            "brittleness": None if pair is None else _brittleness_data(pair),
            "competent": dict(self.competent),
            "parameters": self.parameters and dict(self.parameters),
            "warnings": list(self.warnings),
            "config": dict(self.config),
            "versions": dict(self.versions),
        }

    def save(self, directory: str | Path) -> None:
        """Write robustness.safetensors and robustness.json; each appears whole or not at all."""
        directory = Path(directory)
        tensors = {f"{side}.metric": own.contiguous() for side, own in self.metrics.items()}
        tensors |= {f"{side}.top": own.contiguous() for side, own in (self.tops or {}).items()}
        for side, influence in (self.influences or {}).items():
            tensors[f"{side}.effects"] = influence.effects.contiguous()
            tensors[f"{side}.clean"] = influence.clean.contiguous()
        write_atomically(directory / _NUMBERS, to_bytes(tensors))
        fields = {
            **{name: getattr(self, name) for name in ("task", "metric", "warnings")},
            **{name: getattr(self, name) for name in ("parameters", "config", "versions")},
            "conditions": [vars(condition) for condition in self.conditions],
            "influences": {side: _about(own) for side, own in (self.influences or {}).items()},
        }
        files.write(directory / _TEXTS, _KIND, fields)

    def __repr__(self) -> str:
        teacher, student = (self.frame[self.frame["side"] == side] for side in _SIDES)
        lines = [
            f"Robustness of {self.config['student']} against {self.config['teacher']} on "
            f"{self.task}, {self.config['n']} prompts; teacher, student, same answer",
        ]
        for place, condition in enumerate(self.conditions):
            row = self.agreement.iloc[place]
            lines.append(
                f"  {condition.label:<18} right on {teacher.iloc[place]['accuracy']:>4.0%} "
                f"{student.iloc[place]['accuracy']:>4.0%}, {self.metric.replace('_', ' ')} "
                f"{teacher.iloc[place]['metric']:+.2f} {student.iloc[place]['metric']:+.2f} "
                f"{self.unit}, agreement {row['agreement']:.0%} "
                f"[{row['agreement_low']:.0%}, {row['agreement_high']:.0%}]"
            )
        if self.brittleness is not None:
            lines.append(repr(self.brittleness))
        return "\n".join([*lines, *(f"Note: {warning}" for warning in self.warnings)])


def robustness_of(
    influences: Mapping[str, Influence], parameters: Mapping[str, int] | None
) -> Robustness:
    """What influences alone say: the task as it is, and ablation; no perturbed inputs."""
    teacher = influences["teacher"]
    return Robustness(
        task=teacher.task,
        metric=teacher.metric,
        conditions=(CLEAN,),
        metrics={side: own.clean[None].float() for side, own in influences.items()},
        tops=None,
        influences=dict(influences),
        parameters=parameters,
        warnings=(),
        config={
            **{side: influences[side].model for side in _SIDES},
            "n": len(teacher.clean),
            "variants": [],
            "noise": [],
        },
        versions=versions(),
    )


def load_robustness(directory: str | Path) -> Robustness:
    """Read what `Robustness.save` wrote; raises ``InputError`` where there is none."""
    directory = Path(directory)
    fields = files.read(directory / _TEXTS, _KIND)
    try:
        tensors = load((directory / _NUMBERS).read_bytes())
    except (OSError, SafetensorError) as error:
        raise InputError(f"{directory / _NUMBERS} cannot be read: {error}.") from error
    about = fields.pop("influences")
    influences = {
        side: Influence(
            **{name: own[name] for name in _ABOUT_INFLUENCE},
            nodes=tuple(Node.parse(name) for name in own["nodes"]),
            effects=tensors[f"{side}.effects"],
            clean=tensors[f"{side}.clean"],
        )
        for side, own in about.items()
    }
    has_tops = "teacher.top" in tensors
    fields["conditions"] = tuple(Condition(**each) for each in fields["conditions"])
    fields["warnings"] = tuple(fields["warnings"])
    return Robustness(
        metrics={side: tensors[f"{side}.metric"] for side in _SIDES},
        tops={side: tensors[f"{side}.top"] for side in _SIDES} if has_tops else None,
        influences=influences or None,
        **fields,
    )


def _about(influence: Influence) -> dict[str, Any]:
    about = {name: getattr(influence, name) for name in _ABOUT_INFLUENCE}
    return {**about, "nodes": [node.name for node in influence.nodes]}


def _brittleness_data(pair: PairedBrittleness) -> dict[str, Any]:
    return {
        **{side: _named_records(getattr(pair, side).statistics) for side in _SIDES},
        "difference": _named_records(pair.frame),
        "slopes": _named_records(pair.slopes),
        "compression": pair.compression,
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values; what is missing is null."""
    return files.plain(frame.to_dict(orient="records"))


def _named_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The same of a table whose index says what a row is."""
    return _records(frame.rename_axis("statistic").reset_index())


def _named(condition: Condition) -> dict[str, Any]:
    strength = np.nan if condition.strength is None else condition.strength
    strength = 0.0 if condition.kind == "clean" else strength
    return {"kind": condition.kind, "condition": condition.name, "strength": strength}


def _ends(name: str, interval: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": interval[0], f"{name}_high": interval[1]}


def _percentiles(draws: Float[np.ndarray, "draw"]) -> tuple[float, float]:
    usable = draws[np.isfinite(draws)]
    if not len(usable):
        return np.nan, np.nan
    low, high = percentile_interval(usable)
    return float(low), float(high)
