"""Which of a task's words the given tokenizers can use."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from circuitkd._task_schema import Template, pieces
from circuitkd._tokenising import Misfit, Reader
from circuitkd.tasks import Sentence, Task, TextPrompt

_SHOWN = 8

Lengths = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class UsableWords:
    """Words that every reader can use, and why others were left out.

    ``usable``: word list -> its usable words, for lists whose words stand alone in every template.
    Lists that are glued to other text (the digits of a year) are free; their prompts are judged
    one by one. ``unknown``: words that some reader lacks, with the reason. ``lengths``: how many
    tokens a usable word has for each reader.
    """

    usable: Mapping[str, frozenset[str]]
    unknown: Mapping[str, str]
    lengths: Mapping[str, tuple[int, ...]]

    def of_lengths_in(self, clean: Sentence) -> dict[str, frozenset[str]]:
        """``usable``, each list cut down to the lengths that its words have in ``clean``.

        What replaces the words of ``clean`` must not move its tokens; of words that could only do
        so none needs to be tried.
        """
        labelled = {clean.word(label) for label in clean.spans}
        found = {}
        for name, words in self.usable.items():
            lengths = {self.lengths[word] for word in words & labelled}
            fitting = {word for word in words if self.lengths[word] in lengths}
            found[name] = frozenset(fitting) if lengths else words
        return found

    def keeps_lengths(self, prompt: TextPrompt) -> bool:
        """Whether no labelled word is replaced by one of another length, as far as is known."""
        return all(
            self.lengths.get(prompt.clean.word(label)) == self.lengths.get(word)
            for label in prompt.clean.spans
            if (word := prompt.corrupted.word(label)) in self.lengths
        )

    def message(self) -> str:
        """The words that do not work, as a sentence with a space after it; empty for none."""
        if not self.unknown:
            return ""
        shown = "; ".join(list(self.unknown.values())[:_SHOWN])
        more = len(self.unknown) - _SHOWN
        return f"Words that do not work: {shown}{f'; and {more} more' if more > 0 else ''}. "


def usable_words(task: Task, readers: Sequence[Reader]) -> UsableWords:
    """The words of ``task`` (without variants) that all ``readers`` know.

    Lists whose order means nothing (names, places) are cut down to the words of the commonest
    token length, as long as half of the usable words and at least eight remain: prompts are
    grouped by token positions, and a few long names would scatter them over many small groups.
    Where a list's words may begin a text, their length there is made equal too, on the same
    terms. Sequences keep all their words, whatever their length.
    """
    usable: dict[str, frozenset[str]] = {}
    unknown: dict[str, str] = {}
    lengths: dict[str, tuple[int, ...]] = {}
    ordered = {slot.source for slot in task.slots.values() if slot.run is not None} | {
        slot.source for slot in task.slots.values() if slot.reference is not None
    }
    first = {pieces(template.text)[0][1] for template in task.templates}
    begins = {slot.source for name, slot in task.slots.items() if name in first}
    answering = _answering(task)
    for name in sorted(set(task.word_lists) - _glued(task)):
        found = _lengths(task.word_lists[name].words, readers)
        if name in answering:
            found = {word: _for_masks(word, size, readers) for word, size in found.items()}
        unknown.update({w: flaw.reason for w, flaw in found.items() if isinstance(flaw, Misfit)})
        known = {w: size for w, size in found.items() if not isinstance(size, Misfit)}
        lengths.update({w: within for w, (_, within) in known.items()})
        if name not in ordered:
            known = _of_one_length(known, itemgetter(1))
            known = _of_one_length(known, itemgetter(0)) if name in begins else known
        usable[name] = frozenset(known)
    return UsableWords(usable, unknown, lengths)


def _lengths(words: Sequence[str], readers: Sequence[Reader]) -> dict[str, Lengths | Misfit]:
    """Each word's number of tokens at the start of a text and after a space, for each reader."""
    result: dict[str, Lengths | Misfit] = dict.fromkeys(words, ((), ()))
    for reader in readers:
        texts = [f"{word} {word}" for word in words]
        for word, encoded in zip(words, reader.encode(texts), strict=True):
            second = next(
                (i for i, (_, stop) in enumerate(encoded.offsets) if stop > len(word) + 1),
                len(encoded.ids),
            )
            flaw = encoded.flaw_of_length() or reader.flaw_within(encoded, second, len(encoded.ids))
            so_far = result[word]
            if isinstance(so_far, Misfit):
                continue
            if flaw is not None:
                result[word] = Misfit(f"{reader.name} {flaw}")
                continue
            start, within = so_far
            result[word] = (*start, second), (*within, len(encoded.ids) - second)
    return result


def _answering(task: Task) -> set[str]:
    """Lists whose words answer."""
    answers = [
        a(template) for template in task.templates for a in (task.answer_of, task.distractor_of)
    ]
    return {task.slots[slot].source for text in answers for _, slot, _ in pieces(text) if slot}


def _for_masks(word: str, lengths: Lengths | Misfit, readers: Sequence[Reader]) -> Lengths | Misfit:
    """The lengths of a word, unless it is too long for a mask to stand for it."""
    if isinstance(lengths, Misfit):
        return lengths
    for reader, length in zip(readers, lengths[1], strict=True):
        if reader.blank and length != 1:
            return Misfit(
                f"{reader.name} cuts {word!r} into {length} pieces, and a mask stands for one"
            )
    return lengths


def _of_one_length(
    lengths: Mapping[str, Lengths], part: Callable[[Lengths], tuple[int, ...]]
) -> Mapping[str, Lengths]:
    """The words whose length (that ``part`` picks) is the commonest one, if they are enough."""
    counts = Counter(part(each) for each in lengths.values())
    commonest, number = max(counts.items(), key=itemgetter(1), default=((), 0))
    if number < 8 or 2 * number < len(lengths):
        return lengths
    return {word: each for word, each in lengths.items() if part(each) == commonest}


def _glued(task: Task) -> set[str]:
    """Lists with a slot that touches other letters or digits in some template."""
    found: set[str] = set()
    for template in task.templates:
        for answer in (task.answer_of(template), task.distractor_of(template)):
            found |= _glued_in(task, template, answer)
    return found


def _glued_in(task: Task, template: Template, answer: str) -> set[str]:
    parts = pieces(template.text + answer)
    found = set()
    for i, (_, slot, _) in enumerate(parts):
        if slot is None:
            continue
        before = parts[i - 1] if i else (" ", None, None)
        after = parts[i + 1] if i + 1 < len(parts) else (" ", None, None)
        if before[1] or after[1] or not before[0][-1].isspace() or after[0][0].isalnum():
            found.add(task.slots[slot].source)
    return found
