"""``Comparison``: what comparing two models gives, and how it reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from circuitkd.circuits._role_result import HeadRoles
from circuitkd.circuits.influence_result import Influence
from circuitkd.compare import _report, _storage
from circuitkd.compare._robustness_result import Robustness
from circuitkd.compare._swap_result import SwapTest
from circuitkd.compare.alignment import Alignment
from circuitkd.compare.matching import (
    Restructuring,
    effective_number,
    gini,
    match,
    matches_frame,
    restructuring,
)
from circuitkd.metrics import accuracy_interval

UNMEASURED_CHANCE = 0.25
"""Similarity below which influence counts as lost where no random student was measured."""


@dataclass(frozen=True)
class Performance:
    """How well a model does the task, before anything is ablated.

    ``mean``, ``low``, ``high``: the clean metric and its 95 % bootstrap interval over prompts, in
    ``unit``. ``accuracy`` has a Wilson interval, which does not collapse at 100 %. ``competent``:
    whether the metric's interval lies above 0.
    """

    name: str
    metric: str
    unit: str
    mean: float
    low: float
    high: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    competent: bool


@dataclass(frozen=True)
class Comparison:
    """How a student's circuit relates to its teacher's on one task.

    Attributes:
        alignments: ``transport``, ``signed transport``, ``weighted argmax`` and, where it exists,
            ``paper``: each an ``Alignment`` with interval, null, ceiling and floor.
        influences: ``Influence`` of ``"teacher"`` and ``"student"``, prompt by prompt.
        similarity: teacher nodes × student nodes, in [0, 1].
        similarity_low, similarity_high: its 95 % bootstrap interval over prompts, pair by pair;
            ``None`` where nothing was resampled.
        paper_similarity: the same by the paper's measures, or ``None``.
        plan: the transport plan, teacher nodes × student nodes; sums to 1.
        chance_similarity: the similarity that 95 % of the teacher's influence does not exceed when
            it is moved to randomly initialised students; ``None`` where none was measured.
        robustness: what single ablations cost each model (``robustness.brittleness``) and, where
            details were asked for, how both behave on perturbed inputs.
        warnings: what a reader of the numbers must know, in words.
        config: the arguments it was made with.
        versions: of circuitkd and what it builds on.
        roles: ``HeadRoles`` of ``"teacher"`` and ``"student"``, where details were asked for.
        swaps: the swap test of the strongest matches, likewise.
    """

    alignments: Mapping[str, Alignment]
    influences: Mapping[str, Influence]
    similarity: pd.DataFrame
    similarity_low: pd.DataFrame | None
    similarity_high: pd.DataFrame | None
    paper_similarity: pd.DataFrame | None
    plan: pd.DataFrame
    chance_similarity: float | None
    robustness: Robustness
    warnings: tuple[str, ...]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    roles: Mapping[str, HeadRoles] | None = None
    swaps: SwapTest | None = None

    @property
    def alignment(self) -> Alignment:
        """The transport alignment: the number that circuitkd stands for."""
        return self.alignments["transport"]

    @property
    def paper_alignment(self) -> Alignment | None:
        """The published formula; ``None`` where it does not exist (see ``warnings``)."""
        return self.alignments.get("paper")

    @cached_property
    def performance(self) -> dict[str, Performance]:
        """Clean metric and accuracy of ``"teacher"`` and ``"student"``."""
        return {side: performance_of(influence) for side, influence in self.influences.items()}

    @cached_property
    def matches(self) -> pd.DataFrame:
        """Matched pairs, most mass first: by transport, or by the paper's rule in preset ``paper``.

        Columns: teacher, student, kind, similarity (with similarity_low and similarity_high where
        it was resampled), mass, teacher_share, student_share; where there is a swap test also
        survived and verified, missing for pairs that it did not test. Mass that moves at a
        similarity below the threshold of ``restructuring`` is no match but a loss.
        """
        if self.config["preset"] == "paper" and self.paper_similarity is not None:
            frame = self.matched("argmax", self.paper_similarity)
        else:
            frame = self.matched("transport")
        return frame if self.swaps is None else with_swaps(frame, self.swaps)

    def matched(self, method: str, similarity: pd.DataFrame | None = None) -> pd.DataFrame:
        """The pairs of another matching: ``argmax``, ``one-to-one`` or ``transport``."""
        values = (self.similarity if similarity is None else similarity).to_numpy()
        p, q = (self.influences[side].share() for side in ("teacher", "student"))
        left, right = (self.influences[side].nodes for side in ("teacher", "student"))
        kinds = np.array([[a.kind == b.kind for b in right] for a in left])
        plan = self.plan.to_numpy()
        if method != "transport" or similarity is not None:
            plan = match(p, q, values, method, kinds)
        frame = matches_frame(plan, values, p, q, left, right)
        if similarity is None and self.similarity_low is not None:
            for end in ("low", "high"):
                table: pd.DataFrame = getattr(self, f"similarity_{end}")
                pairs = zip(frame.teacher, frame.student, strict=True)
                frame[f"similarity_{end}"] = [float(table.loc[pair]) for pair in pairs]
        return frame

    @cached_property
    def restructuring(self) -> Restructuring:
        """Merges, splits and drops at the default thresholds; ``restructured`` takes others."""
        return self.restructured()

    def restructured(
        self, *, threshold: float | None = None, part: float = 0.1, least: float = 0.01
    ) -> Restructuring:
        """Merges, splits and drops of the transport plan (see `matching.restructuring`).

        ``threshold``: the similarity below which influence counts as lost; by default
            ``chance_similarity``, and 0.25 where that was not measured.
        """
        if threshold is None:
            threshold = self.chance_similarity
        if threshold is None:
            threshold = UNMEASURED_CHANCE
        return restructuring(
            self.plan.to_numpy(),
            self.similarity.to_numpy(),
            self.influences["teacher"].nodes,
            self.influences["student"].nodes,
            threshold=threshold,
            part=part,
            least=least,
        )

    @cached_property
    def concentration(self) -> pd.DataFrame:
        """How few components carry each model's influence: side, components, gini, effective.

        ``gini`` of the shares: 0 where all are equal, near 1 where one has all. ``effective``
        number of components = 1 / Σ share²: 1 where one has all.
        """
        rows = [
            {
                "side": side,
                "components": len(influence.nodes),
                "gini": gini(influence.share()),
                "effective": effective_number(influence.share()),
            }
            for side, influence in self.influences.items()
        ]
        return pd.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``: what ``circuitkd score --json`` prints."""
        return _report.as_plain_data(self)

    def save(self, directory: str | Path) -> None:
        """Write comparison.safetensors and comparison.json; each appears whole or not at all."""
        _storage.save(self, Path(directory))

    def __repr__(self) -> str:
        return _report.as_text(self)


def with_swaps(matches: pd.DataFrame, swaps: SwapTest) -> pd.DataFrame:
    """A table of matches with the columns survived and verified of their swap test."""
    tested = swaps.frame[["teacher", "student", "survived", "verified"]]
    return matches.merge(tested.astype({"verified": "boolean"}), "left", ["teacher", "student"])


def load_comparison(directory: str | Path) -> Comparison:
    """Read what `Comparison.save` wrote; raises ``InputError`` where there is none."""
    return Comparison(**_storage.load_fields(Path(directory)))


def performance_of(influence: Influence) -> Performance:
    """The clean performance that an influence was measured against."""
    clean = influence.clean.double().numpy()
    low, high = influence.clean_interval
    accuracy_low, accuracy_high = accuracy_interval(influence.clean)
    return Performance(
        name=influence.model,
        metric=influence.metric,
        unit=influence.unit,
        mean=float(clean.mean()),
        low=low,
        high=high,
        accuracy=influence.accuracy,
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        competent=influence.competent,
    )
