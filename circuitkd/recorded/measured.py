"""A measured number, and prompts as the published experiments put them together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from circuitkd._sampling import MEAN_PROMPTS
from circuitkd.prompts import PromptGroup, Prompts


@dataclass(frozen=True)
class Measured:
    """A number with its 95 % interval, or why there is none.

    ``exact``: the interval does not say how uncertain the number is (it is over components, and no
    prompts were drawn), so that the number itself is what must agree.

    >>> Measured.none("it rained").missing
    'it rained'
    """

    value: float
    low: float | None = None
    high: float | None = None
    missing: str | None = None
    exact: bool = False

    @classmethod
    def none(cls, why: str) -> "Measured":
        """No number, because ``why``."""
        return cls(float("nan"), missing=why)

    def distance(self, recorded: float) -> float:
        """How far ``recorded`` lies outside the interval; from the value, where that must agree.

        >>> Measured(5.0, 4.0, 6.0).distance(7.5), Measured(5.0).distance(4.0)
        (1.5, 1.0)
        >>> Measured(5.0, 4.0, 6.0, exact=True).distance(5.5)
        0.5
        """
        if self.exact or self.low is None or self.high is None:
            return abs(self.value - recorded)
        low, high = min(self.low, self.value), max(self.high, self.value)
        return max(low - recorded, recorded - high, 0.0)


def pooled(sides: Sequence[Prompts]) -> tuple[Prompts, ...]:
    """The same prompts, groups of equal shape joined across templates.

    The published procedure averages over the corrupted prompts of all templates at once, which have
    equally many tokens. Means come from the paired corrupted prompts, as published, or from those
    drawn for means where the pairs are too few. Group k of one side stays group k of the others.

    >>> from circuitkd import load_model, load_task
    >>> prompts = load_task("numerals").sample(load_model("tiny-teacher"), n=80)
    >>> joined, = pooled([prompts])
    >>> len(prompts.groups), len(joined.groups), len(joined.groups[0].means)
    (6, 1, 80)
    """
    pools: dict[Hashable, list[int]] = {}
    for number, groups in enumerate(zip(*(side.groups for side in sides), strict=True)):
        # Endings offered as candidates may differ between groups: those stay apart.
        apart = number if any(group.candidates is not None for group in groups) else None
        pools.setdefault((apart, *map(_shape, groups)), []).append(number)
    return tuple(
        replace(
            side,
            groups=tuple(
                _joined([side.groups[number] for number in numbers]) for numbers in pools.values()
            ),
        )
        for side in sides
    )


def _shape(group: PromptGroup) -> Hashable:
    places = tuple((label, int(at[0])) for label, at in group.positions.items())
    return group.clean.shape[1], places


def _joined(groups: Sequence[PromptGroup]) -> PromptGroup:
    first = groups[0]
    corrupted = torch.cat([group.corrupted for group in groups])
    enough = len(corrupted) >= MEAN_PROMPTS
    spans = [group.spans for group in groups if group.spans is not None]
    return replace(
        first,
        clean=torch.cat([group.clean for group in groups]),
        corrupted=corrupted,
        correct=torch.cat([group.correct for group in groups]),
        incorrect=torch.cat([group.incorrect for group in groups]),
        positions={
            label: torch.cat([group.positions[label] for group in groups])
            for label in first.positions
        },
        texts=tuple(text for group in groups for text in group.texts),
        corrupted_texts=tuple(text for group in groups for text in group.corrupted_texts),
        index=torch.cat([group.index for group in groups]),
        means=corrupted if enough else torch.cat([group.means for group in groups]),
        spans=torch.cat(spans) if len(spans) == len(groups) else None,
    )
