"""Drawing prompts that fit one or more tokenizers at once.

Prompt number j of a stream is drawn by a random generator of its own, seeded with (seed, stream,
j), and is kept or dropped whatever happens to the others. So the first ten of a hundred prompts
are the ten that would have been drawn alone, and the prompts drawn for means do not depend on how
many prompts were asked for.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice

import numpy as np

from circuitkd._tokenising import Misfit, Question, Reader, Reading
from circuitkd._vocabulary import UsableWords
from circuitkd.errors import TaskError, VocabularyError
from circuitkd.tasks import Task, TextPrompt

MEAN_PROMPTS = 64
"""Corrupted prompts drawn for each group's means."""
RECORRUPTIONS = 20
"""How often a corruption that does not fit is drawn anew before the whole prompt is."""
REJECTIONS = 256
"""Prompts that may fail one after the other before a task is said not to fit."""
MEAN_TRIES = 512
"""Most prompts that are drawn of one template for the means of its groups."""
RARE_AFTER = 128
"""After so many of them, shapes too rare to be met often enough are not waited for."""

_UNEVEN = "no corruption has its tokens where the clean prompt has them"
_CHUNK = 64
_PROMPT_STREAM, _MEAN_STREAM, _REPEAT_STREAM, _RARE_STREAM = range(4)

Endings = tuple[tuple[str, tuple[int, ...]], ...]
Shape = tuple[int, tuple[tuple[int, tuple[tuple[str, int], ...]], ...]]
Key = tuple[int, tuple[tuple[int, tuple[tuple[str, int], ...]], ...], Endings]


@dataclass(frozen=True)
class Drawn:
    """A prompt that fits: how each reader reads its clean and its corrupted side.

    ``endings``: for metrics over sets, the endings that every reader can offer, each with its
    token for each reader.
    """

    prompt: TextPrompt
    clean: tuple[Reading, ...]
    corrupted: tuple[Reading, ...]
    endings: Endings = ()

    @property
    def key(self) -> Key:
        """What the prompts of a group share: template, shape for each reader, endings."""
        return self.prompt.template, tuple(r.shape for r in self.clean), self.endings


@dataclass(frozen=True)
class Sampler:
    """A task (without variants) as the given readers can pose it."""

    task: Task
    readers: tuple[Reader, ...]
    words: UsableWords
    seed: int

    def sample(self, n: int) -> list[Drawn]:
        """``n`` prompts, all different as long as the task has that many.

        Raises:
            VocabularyError: the readers cannot pose the task.
        """
        found: dict[str, Drawn] = {}
        idle = 0
        for drawn in self._fitting(self._stream((_PROMPT_STREAM,), None, endings=True)):
            idle = idle + 1 if drawn.prompt.clean.text in found else 0
            found.setdefault(drawn.prompt.clean.text, drawn)
            if len(found) == n or idle > max(200, 5 * len(found)):
                break
        if len(found) < n:
            warnings.warn(
                f"Task {self.task.name} has only {len(found)} different prompts here, so the "
                f"{n} prompts repeat them (with other corruptions).",
                stacklevel=2,
            )
        prompts = list(found.values())
        return prompts + self._corruptions(prompts, n - len(prompts), _REPEAT_STREAM)

    def means(self, groups: Mapping[Key, Sequence[Drawn]]) -> dict[Key, list[Drawn]]:
        """``MEAN_PROMPTS`` prompts of each group's template and shape, drawn for their corruptions.

        Where fresh draws do not meet a shape often enough, fresh corruptions of the group's own
        prompts make up the number.
        """
        found: dict[Shape, list[Drawn]] = {}
        for template in sorted({key[0] for key in groups}):
            found |= self._fresh_means(template, {key[:2] for key in groups if key[0] == template})
        return {
            key: found[key[:2]]
            + self._corruptions(own, MEAN_PROMPTS - len(found[key[:2]]), _RARE_STREAM)
            for key, own in groups.items()
        }

    def _fresh_means(self, template: int, shapes: set[Shape]) -> dict[Shape, list[Drawn]]:
        """Up to ``MEAN_PROMPTS`` fresh draws of one template for each of ``shapes``."""
        found: dict[Shape, list[Drawn]] = {shape: [] for shape in shapes}
        open_shapes = set(shapes)
        stream = self._stream((_MEAN_STREAM, template), template, endings=False)
        for number, drawn in enumerate(islice(stream, MEAN_TRIES), start=1):
            if isinstance(drawn, Drawn) and (shape := drawn.key[:2]) in open_shapes:
                found[shape].append(drawn)
                if len(found[shape]) == MEAN_PROMPTS:
                    open_shapes.remove(shape)
            if number == RARE_AFTER:
                rest = MEAN_TRIES // RARE_AFTER
                open_shapes -= {s for s, own in found.items() if len(own) * rest < MEAN_PROMPTS}
            if not open_shapes:
                break
        return found

    def _corruptions(self, prompts: Sequence[Drawn], n: int, stream: int) -> list[Drawn]:
        """``prompts`` in turn until there are ``n``, with fresh corruptions where some fit."""
        chosen = list(islice(cycle(prompts), n))
        rngs = [self._rng(stream, number) for number in range(n)]
        redrawn = [
            self._recorrupt(drawn.prompt, rng) for drawn, rng in zip(chosen, rngs, strict=True)
        ]
        fitted = self._fit(redrawn, rngs)
        return [
            Drawn(new.prompt, new.clean, new.corrupted, old.endings)
            if isinstance(new, Drawn)
            else old
            for new, old in zip(fitted, chosen, strict=True)
        ]

    def _fitting(self, stream: Iterator[Drawn | Misfit]) -> Iterator[Drawn]:
        """The prompts that fit; an error when too many in a row do not."""
        reasons: Counter[str] = Counter()
        for drawn in stream:
            if isinstance(drawn, Drawn):
                reasons.clear()
                yield drawn
                continue
            reasons[drawn.reason] += 1
            if reasons.total() == REJECTIONS:
                raise VocabularyError(self._refusal(reasons))

    def _refusal(self, reasons: Counter[str]) -> str:
        names = " and ".join(dict.fromkeys(reader.name for reader in self.readers))
        common = "; ".join(reason for reason, _ in reasons.most_common(3))
        return (
            f"Task {self.task.name} cannot be posed with {names}: none of {REJECTIONS} prompts "
            f"fitted. {self.words.message()}Most common reasons: {common}. Use a model whose "
            "tokenizer knows the task's words, or change the task file's words."
        )

    def _rng(self, *path: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=path))

    def _stream(
        self, path: tuple[int, ...], template: int | None, *, endings: bool
    ) -> Iterator[Drawn | Misfit]:
        """Independent draws without end, tokenised in chunks."""
        for first in count(step=_CHUNK):
            rngs = [self._rng(*path, number) for number in range(first, first + _CHUNK)]
            drawn = self._fit([self._draw(rng, template) for rng in rngs], rngs)
            yield from self._with_endings(drawn) if endings else drawn

    def _draw(self, rng: np.random.Generator, template: int | None) -> TextPrompt | Misfit:
        try:
            prompt = self.task.draw(rng, template=template, usable=self.words.usable)
        except TaskError as error:  # too few usable words for this template
            return Misfit(str(error).rstrip("."))
        return prompt if self.words.keeps_lengths(prompt) else self._recorrupt(prompt, rng)

    def _recorrupt(self, prompt: TextPrompt, rng: np.random.Generator) -> TextPrompt | Misfit:
        """The prompt with a fresh corruption that keeps the length of every word that is known."""
        usable = self.words.of_lengths_in(prompt.clean)
        for _ in range(RECORRUPTIONS):
            try:
                prompt = self.task.recorrupt(prompt, rng, usable=usable)
            except TaskError as error:
                return Misfit(str(error).rstrip("."))
            if self.words.keeps_lengths(prompt):
                return prompt
        return Misfit(_UNEVEN)

    def _fit(
        self, prompts: Sequence[TextPrompt | Misfit], rngs: Sequence[np.random.Generator]
    ) -> list[Drawn | Misfit]:
        """Each prompt as it is read; corruptions that do not fit are drawn anew a few times."""
        result: list[Drawn | Misfit] = [p if isinstance(p, Misfit) else Misfit("") for p in prompts]
        pending = {i: p for i, p in enumerate(prompts) if isinstance(p, TextPrompt)}
        clean: dict[int, tuple[Reading, ...]] = {}
        for i, readings in self._read(pending, "clean").items():
            if isinstance(readings, Misfit):
                result[i] = readings
                del pending[i]
            else:
                clean[i] = readings
        for last in (*(False for _ in range(RECORRUPTIONS)), True):
            for i, readings in self._read(pending, "corrupted").items():
                prompt = pending.pop(i)
                result[i] = pair_of(prompt, clean[i], readings)
                if last or isinstance(result[i], Drawn):
                    continue
                again = self._recorrupt(prompt, rngs[i])
                if isinstance(again, TextPrompt):
                    pending[i] = again
        return result

    def _read(
        self, prompts: Mapping[int, TextPrompt], side: str
    ) -> dict[int, tuple[Reading, ...] | Misfit]:
        """One side of the prompts as every reader reads it."""
        questions = [
            Question(getattr(prompt, side), prompt.correct, prompt.incorrect)
            for prompt in prompts.values()
        ]
        read = [reader.read(questions) for reader in self.readers]
        return {
            i: self._all_or_misfit(readings)
            for i, readings in zip(prompts, zip(*read, strict=True), strict=True)
        }

    def _all_or_misfit(
        self, readings: tuple[Reading | Misfit, ...]
    ) -> tuple[Reading, ...] | Misfit:
        for reader, reading in zip(self.readers, readings, strict=True):
            if isinstance(reading, Misfit):
                return Misfit(f"{reader.name} {reading.reason}")
        return tuple(reading for reading in readings if isinstance(reading, Reading))

    def _with_endings(self, drawn: Sequence[Drawn | Misfit]) -> Iterator[Drawn | Misfit]:
        is_set = self.task.metric == "probability_difference"
        for each in drawn:
            yield self._add_endings(each) if is_set and isinstance(each, Drawn) else each

    def _add_endings(self, drawn: Drawn) -> Drawn | Misfit:
        prompt = drawn.prompt
        offered = [
            reader.read_endings(prompt.clean.text, (*prompt.invalid, *prompt.valid), reading)
            for reader, reading in zip(self.readers, drawn.clean, strict=True)
        ]
        for reader, tokens in zip(self.readers, offered, strict=True):
            for ending in (prompt.correct, prompt.incorrect):
                if ending not in tokens:
                    return Misfit(f"{reader.name} has no token of its own for {ending!r}")
        usable = sorted(set.intersection(*(set(tokens) for tokens in offered)))
        endings = tuple((e, tuple(tokens[e] for tokens in offered)) for e in usable)
        return Drawn(prompt, drawn.clean, drawn.corrupted, endings)


def pair_of(
    prompt: TextPrompt, clean: tuple[Reading, ...], corrupted: tuple[Reading, ...] | Misfit
) -> Drawn | Misfit:
    """The prompt, if its corrupted side is read in the clean side's shape with its answers."""
    if isinstance(corrupted, Misfit):
        return corrupted
    for one, other in zip(clean, corrupted, strict=True):
        if one.shape != other.shape:
            return Misfit(_UNEVEN)
        if (one.correct, one.incorrect) != (other.correct, other.incorrect):
            return Misfit("the answers are other tokens after the corrupted prompt")
    return Drawn(prompt, clean, corrupted)
