"""Recorded numbers computed again from recorded raw values: the formulas, without a model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from circuitkd.compare._robustness_statistics import (
    clamped_drops,
    component_difference,
    component_interval,
    drop_statistics,
)
from circuitkd.compare.alignment import paper_alignment
from circuitkd.recorded.measured import Measured
from circuitkd.recorded.schema import Line, Record

NOTHING_TO_MEASURE = "there is nothing to measure it on"


@dataclass(frozen=True)
class Arithmetic:
    """The raw values of a record, as something to measure on.

    >>> from circuitkd.recorded.schema import shipped_record
    >>> record = shipped_record("arithmetic")
    >>> round(Arithmetic(record).measure(record.lines[0]).value, 2)
    3.06
    """

    record: Record

    def measure(self, line: Line) -> Measured:
        """The line's number from the raw values; intervals are over components, as published."""
        if line.quantity == "paper_alignment" and self.record.pairs:
            return Measured(paper_alignment(np.array(self.record.pairs)))
        statistics = drop_statistics()
        if line.quantity not in statistics:
            return Measured.none(NOTHING_TO_MEASURE)
        drops = self._drops()
        statistic = {line.quantity: statistics[line.quantity]}
        own = drops.get(str(line.side))
        if own is not None:
            (ends,) = component_interval(own, statistic).values()
            return Measured(float(statistic[line.quantity](own)), *ends, exact=True)
        compression = self._compression(str(line.side))
        if not {"teacher", "student"} <= set(drops) or compression is None:
            return Measured.none(NOTHING_TO_MEASURE)
        (found,) = component_difference(drops["teacher"], drops["student"], statistic).values()
        value, low, high = (each / compression for each in found)
        return Measured(value, low, high, exact=True)

    def _drops(self) -> Mapping[str, Float[np.ndarray, "node"]]:
        return {
            side: clamped_drops(list(profile.values()))
            for side, profile in self.record.profiles.items()
        }

    def _compression(self, side: str) -> float | None:
        """What a difference is divided by: nothing, or ten times the compression."""
        if side == "difference":
            return 1.0
        parameters = self.record.parameters
        if parameters is None:
            return None
        return 10 * (parameters["teacher"] - parameters["student"]) / parameters["teacher"]
