"""Numbers that a search asked for, kept so that an interrupted search can go on."""

from collections.abc import Callable

import torch

from circuitkd.errors import RunError
from circuitkd.runs import Checkpoint

_SAVED_EVERY = 20  # answers between two checkpoints


class RecordedAnswers:
    """The answers to a greedy search's questions, in the order in which they were asked.

    A search that goes on asks the same questions in the same order, because every decision
    follows from the answers before it. So the place of an answer is all that has to be kept.
    """

    def __init__(self, checkpoint: Checkpoint, key: str) -> None:
        self._checkpoint, self._key = checkpoint, key
        kept = checkpoint.get(key) or {}
        self._stored: list[float] = kept.get("answers", torch.zeros(0)).tolist()
        self._asked: list[float] = []

    def ask(self, compute: Callable[[], float]) -> float:
        """The next answer: a kept one, else ``compute()``.

        Raises:
            RunError: it is not finite.
        """
        place = len(self._asked)
        if place < len(self._stored):
            self._asked.append(self._stored[place])
            return self._stored[place]
        value = compute()
        if value - value != 0:  # NaN or infinite
            raise RunError("An ablated run gave NaN or infinite metrics; try dtype float32.")
        self._asked.append(value)
        if len(self._asked) % _SAVED_EVERY == 0:
            self.save()
        return value

    def save(self) -> None:
        """Keep what is known so far."""
        if len(self._asked) > len(self._stored):
            answers = torch.tensor(self._asked, dtype=torch.float64)
            self._checkpoint.put(self._key, {"answers": answers})
