"""``SwapTest``: which matches survive, prompt by prompt."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits._saved import opened_numbers, write_numbers
from circuitkd.metrics import UNITS, bootstrap_means, percentile_interval
from circuitkd.nodes import Node

BEATEN = 0.9
"""The part of the random components that a verified match must do better than."""

_TEXTS = ("teacher", "student", "task", "metric")
_DRAWS = 2000


@dataclass(frozen=True)
class SwapTest:
    """The teacher's metric with student components in the place of its own (see `swap`).

    Attributes:
        matches: (teacher's, student's) node.
        controls: for each match the random components of the student that it is compared with.
        explained: for each match the share of the teacher component's centred output, in squared
            size, that the map from the student's accounts for on the prompts it was fitted on.
        clean: the teacher's metric on each prompt, in sampling order.
        ablated: with each match's teacher component at its mean.
        swapped: for each match the metric with the student's component in its place, then with
            each of the controls.
    """

    teacher: str
    student: str
    task: str
    metric: str
    matches: tuple[tuple[Node, Node], ...]
    controls: tuple[tuple[Node, ...], ...]
    explained: tuple[float, ...]
    clean: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "match prompt"]
    swapped: tuple[Float[Tensor, "_ prompt"], ...]

    @property
    def unit(self) -> str:
        """Unit of the metric: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a match.

        Columns: teacher, student, kind; ``damage``, what mean ablation of the teacher's component
        takes from the metric (clean − ablated, in ``unit``); ``survived``, the share of it that the
        student's component restores; both with 95 % bootstrap intervals over prompts (``_low``,
        ``_high``); ``explained``; ``control_mean`` and ``control_best``, what the random components
        restore; ``controls``, how many there are, and ``beaten``, how many of them the match does
        better than; ``verified``.

        ``survived`` and what is compared with it are withheld (NaN) where the interval of
        ``damage`` holds 0: there is nothing to restore.
        """
        return pd.DataFrame([self._row(place) for place in range(len(self.matches))])

    @property
    def verified(self) -> tuple[tuple[Node, Node], ...]:
        """The matches that survive."""
        kept = zip(self.matches, self.frame["verified"], strict=True)
        return tuple(match for match, survives in kept if survives)

    def _row(self, place: int) -> dict[str, object]:
        ours, theirs = self.matches[place]
        candidates = self.swapped[place].double()
        gained = (candidates - self.ablated[place].double()).numpy().T
        damage = (self.clean.double() - self.ablated[place].double()).numpy()
        means = np.concatenate([[damage.mean()], gained.mean(0)])
        drawn = bootstrap_means(np.column_stack([damage, gained]), draws=_DRAWS)
        low, high = _interval(drawn[:, 0])
        row: dict[str, object] = {
            "teacher": ours.name,
            "student": theirs.name,
            "kind": ours.kind,
            "damage": means[0],
            "damage_low": low,
            "damage_high": high,
        }
        usable = low > 0 or high < 0
        shares = means[1:] / means[0] if usable else np.full(len(means) - 1, np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = drawn[:, 1] / drawn[:, 0] if usable else np.full(len(drawn), np.nan)
        # In the metric's unit and not as shares: a noisy denominator would hide what is sure.
        restored = np.sign(means[0]) * drawn[:, 1:] if usable else np.zeros_like(drawn[:, 1:])
        rivals = restored[:, :1] - restored[:, 1:]
        beaten = sum(_interval(difference)[0] > 0 for difference in rivals.T)
        low, high = _interval(draws)
        others = shares[1:]
        return {
            **row,
            "survived": shares[0],
            "survived_low": low,
            "survived_high": high,
            "explained": self.explained[place],
            "control_mean": others.mean() if len(others) else np.nan,
            "control_best": others.max() if len(others) else np.nan,
            "controls": len(others),
            "beaten": beaten,
            "verified": bool(
                _interval(restored[:, 0])[0] > 0 and 0 < len(others) * BEATEN <= beaten
            ),
        }

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        about: dict[str, Any] = {name: getattr(self, name) for name in _TEXTS}
        about["explained"] = list(self.explained)
        about["matches"] = [[node.name for node in match] for match in self.matches]
        about["controls"] = [[node.name for node in nodes] for nodes in self.controls]
        tensors = {"clean": self.clean, "ablated": self.ablated}
        tensors |= {f"swapped.{k}": own for k, own in enumerate(self.swapped)}
        write_numbers(path, about, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "SwapTest":
        """Read what ``save`` wrote."""
        with opened_numbers(path, cls.__name__) as (about, tensors):
            return cls(
                **{name: about[name] for name in _TEXTS},
                matches=tuple((Node.parse(a), Node.parse(b)) for a, b in about["matches"]),
                controls=tuple(tuple(map(Node.parse, names)) for names in about["controls"]),
                explained=tuple(about["explained"]),
                clean=tensors["clean"],
                ablated=tensors["ablated"],
                swapped=tuple(tensors[f"swapped.{k}"] for k in range(len(about["matches"]))),
            )

    def __repr__(self) -> str:
        lines = [
            f"Swap test of {len(self.matches)} matches on {self.task}, {len(self.clean)} prompts: "
            f"{self.student}'s components in the place of {self.teacher}'s; "
            f"{len(self.verified)} verified"
        ]
        for row in self.frame.to_dict("records"):
            pair = f"T {Node.parse(row['teacher']).label} ← S {Node.parse(row['student']).label}"
            if np.isnan(row["survived"]):
                lines.append(f"  {pair:<22} no effect to restore")
                continue
            lines.append(
                f"  {pair:<22} survived {row['survived']:+.2f} "
                f"[{row['survived_low']:+.2f}, {row['survived_high']:+.2f}] of "
                f"{row['damage']:+.3f} {self.unit}; random {row['control_mean']:+.2f}, "
                f"{row['beaten']} of {row['controls']} beaten"
                + (", verified" if row["verified"] else "")
            )
        return "\n".join(lines)


def _interval(draws: Float[np.ndarray, "draw"]) -> tuple[float, float]:
    usable = draws[np.isfinite(draws)]
    if not len(usable):
        return np.nan, np.nan
    low, high = percentile_interval(usable)
    return float(low), float(high)
