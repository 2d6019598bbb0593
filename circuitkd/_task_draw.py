"""Drawing prompts from a task without variants: words for slots, then a corrupted twin."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from circuitkd._task_schema import Slot, TaskSpec, Template, WordList, pieces, slots_in
from circuitkd.errors import TaskError

Usable = Mapping[str, Collection[str]]

# Redraws are tried in sequence without looking ahead; a list with a few spare words never needs
# more than a handful of tries.
_TRIES = 200


@dataclass(frozen=True)
class Sentence:
    """A rendered template.

    ``spans`` maps a position label to the character span ``[start, end)`` of its word in
    ``text``. The label ``END`` has no span: it is the last token, whatever that will be.

    >>> sentence = Sentence("Mary saw Tom", {"S": (0, 4)})
    >>> sentence.word("S")
    'Mary'
    """

    text: str
    spans: Mapping[str, tuple[int, int]]

    def word(self, label: str) -> str:
        """The word at ``label``."""
        start, end = self.spans[label]
        return self.text[start:end]


@dataclass(frozen=True)
class TextPrompt:
    """One clean prompt, its corrupted twin and its answers, as text.

    ``template`` is the index of the template within the task or variant. ``correct`` and
    ``incorrect`` continue the text as they are, leading space included. ``valid`` and ``invalid``
    hold all right and wrong endings of a ``probability_difference`` task and are empty otherwise.
    ``slots`` maps each slot to its word in the clean prompt.
    """

    template: int
    clean: Sentence
    corrupted: Sentence
    correct: str
    incorrect: str
    valid: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    slots: Mapping[str, str] = field(default_factory=dict)
    variant: str | None = None


def draw_prompt(
    spec: TaskSpec, rng: np.random.Generator, template: int | None, usable: Usable | None
) -> TextPrompt:
    """A prompt of ``spec``; see ``Task.draw``."""
    if template is None:
        template = int(rng.integers(len(spec.templates)))
    elif not 0 <= template < len(spec.templates):
        raise TaskError(
            f"Task {spec.name} has no template {template}: use 0 to {len(spec.templates) - 1}."
        )
    chosen = spec.templates[template]
    answer, distractor = spec.answer_of(chosen), spec.distractor_of(chosen)
    slots = _draw_slots(spec, chosen, rng, usable)
    prompt = TextPrompt(
        template=template,
        clean=render(spec, chosen, slots, {}),
        corrupted=Sentence("", {}),
        correct=_fill(answer, slots),
        incorrect=_fill(distractor, slots),
        valid=_endings(spec, answer, slots, usable),
        invalid=_endings(spec, distractor, slots, usable),
        slots=slots,
    )
    return draw_corruption(spec, prompt, rng, usable)


def render(
    spec: TaskSpec, template: Template, slots: Mapping[str, str], at: Mapping[str, str]
) -> Sentence:
    """``template`` filled with ``slots``, except for the labels that ``at`` gives a word."""
    text, spans = "", {}
    for fixed, slot, own in pieces(template.text):
        if slot is None:
            text += fixed
            continue
        label = spec.label_of(slot, own)
        word = slots[slot] if label is None else at.get(label, slots[slot])
        if label is not None:
            spans[label] = (len(text), len(text) + len(word))
        text += word
    return Sentence(text, spans)


def draw_corruption(
    spec: TaskSpec, prompt: TextPrompt, rng: np.random.Generator, usable: Usable | None
) -> TextPrompt:
    """``prompt`` with its corrupted side drawn anew."""
    template = spec.templates[prompt.template]
    redraw = spec.redraw_of(template)
    for _ in range(_TRIES):
        words = _draw_labels(spec, prompt.clean, redraw, rng, usable)
        if words is not None:
            words = {**words, **spec.corruption.set}
            return replace(prompt, corrupted=render(spec, template, prompt.slots, words))
    lists = ", ".join(sorted(set(redraw.values())))
    raise TaskError(
        f"Task {spec.name}: too few usable words in {lists} for its corrupted prompts. "
        "Add words to the task file, or use a tokenizer that has more of them."
    )


def run_starts(words: WordList, offsets: Collection[int], usable: Collection[str]) -> list[str]:
    """First words of runs whose members at ``offsets`` all exist and are usable."""
    n = len(words.words)
    return [
        start
        for place, start in enumerate(words.words)
        if (words.starts is None or start in words.starts)
        and (words.cyclic or place + max(offsets) < n)
        and all(words.words[(place + offset) % n] in usable for offset in offsets)
    ]


def run_offsets(spec: TaskSpec, source: str, names: Collection[str]) -> list[int]:
    """The offsets of the run slots of list ``source`` among ``names``."""
    slots = [spec.slots[name] for name in names]
    return [slot.run for slot in slots if slot.source == source and slot.run is not None]


def needed_slots(spec: TaskSpec, template: Template) -> tuple[str, ...]:
    """The slots that ``template`` and its answers use, and those they are compared with."""
    texts = (template.text, spec.answer_of(template), spec.distractor_of(template))
    names = dict.fromkeys(name for text in texts for name in slots_in(text))
    for name in tuple(names):
        if (reference := spec.slots[name].reference) is not None:
            names.setdefault(reference)
    return tuple(names)


def candidates(spec: TaskSpec, slot: Slot, word: str, usable: Usable | None) -> tuple[str, ...]:
    """The words that a slot with ``after`` or ``upto`` may take when its reference is ``word``."""
    words = spec.word_lists[slot.source].words
    cut = words.index(word) + 1
    found = words[cut:] if slot.after is not None else words[:cut]
    allowed = usable_words(spec, slot.source, usable)
    return found if allowed is words else tuple(each for each in found if each in allowed)


def usable_words(spec: TaskSpec, source: str, usable: Usable | None) -> tuple[str, ...]:
    """The words of a list that may be used, in its order."""
    words = spec.word_lists[source].words
    if usable is None or source not in usable:
        return words
    return tuple(word for word in words if word in usable[source])


def _draw_slots(
    spec: TaskSpec, template: Template, rng: np.random.Generator, usable: Usable | None
) -> dict[str, str]:
    names = needed_slots(spec, template)
    filled: dict[str, str] = {}
    for source in dict.fromkeys(spec.slots[name].source for name in names):
        offsets = run_offsets(spec, source, names)
        if not offsets:
            continue
        words = spec.word_lists[source]
        starts = run_starts(words, offsets, usable_words(spec, source, usable))
        start = _pick(spec, source, starts, rng)
        for name in names:
            slot = spec.slots[name]
            if slot.source == source and slot.run is not None:
                filled[name] = words.successor(start, slot.run) or ""
    for name in names:
        slot = spec.slots[name]
        if slot.run is None and slot.reference is None:
            filled[name] = _pick(spec, slot.source, _free(spec, name, filled, names, usable), rng)
    for name in names:
        slot = spec.slots[name]
        if slot.reference is not None:
            options = candidates(spec, slot, filled[slot.reference], usable)
            filled[name] = _pick(spec, slot.source, options, rng)
    return filled


def _free(
    spec: TaskSpec,
    name: str,
    filled: Mapping[str, str],
    names: Collection[str],
    usable: Usable | None,
) -> list[str]:
    """Words for a plain slot that leave a word for every slot that is compared with it."""
    source = spec.slots[name].source
    free = set(usable_words(spec, source, usable))
    free -= {filled[other] for other in filled if spec.slots[other].source == source}
    for slot in (spec.slots[other] for other in names if spec.slots[other].reference == name):
        free &= _words_with_candidates(spec, slot, usable)
    return [word for word in spec.word_lists[source].words if word in free]


def _words_with_candidates(spec: TaskSpec, slot: Slot, usable: Usable | None) -> set[str]:
    """The words of which ``candidates(spec, slot, word, usable)`` is not empty."""
    words = spec.word_lists[slot.source].words
    allowed = usable_words(spec, slot.source, usable)
    if not allowed:
        return set()
    if slot.after is not None:
        return set(words[: words.index(allowed[-1])])
    return set(words[words.index(allowed[0]) :])


def _draw_labels(
    spec: TaskSpec,
    clean: Sentence,
    redraw: Mapping[str, str],
    rng: np.random.Generator,
    usable: Usable | None,
) -> dict[str, str] | None:
    """Words for the redrawn labels, or None when this attempt ran out of words."""
    corruption = spec.corruption
    everything = {clean.word(label) for label in redraw}
    drawn: dict[str, str] = {}
    for label, source in redraw.items():
        avoid = {"all": everything, "same": {clean.word(label)}, "none": set()}[corruption.avoid]
        if corruption.distinct:
            avoid = avoid | set(drawn.values())
        if corruption.no_step is not None and label in corruption.no_step:
            avoid = avoid | _stepping(spec.word_lists[source], corruption.no_step, label, drawn)
        options = [word for word in usable_words(spec, source, usable) if word not in avoid]
        if not options:
            return None
        drawn[label] = options[int(rng.integers(len(options)))]
    return drawn


def _stepping(
    words: WordList, pair: tuple[str, str], label: str, drawn: Mapping[str, str]
) -> set[str]:
    """The words that would make the second of ``pair`` follow the first."""
    first, second = pair
    other = drawn.get(first if label == second else second)
    if other is None or other not in words.words:
        return set()
    step = words.successor(other, 1 if label == second else -1)
    return set() if step is None else {step}


def _endings(
    spec: TaskSpec, expression: str, slots: Mapping[str, str], usable: Usable | None
) -> tuple[str, ...]:
    """All values of an answer expression, for metrics over sets; () for the others."""
    if spec.metric != "probability_difference":
        return ()
    name = next(name for name in slots_in(expression) if spec.slots[name].reference)
    slot = spec.slots[name]
    options = candidates(spec, slot, slots[slot.reference or ""], usable)
    return tuple(_fill(expression, {**slots, name: word}) for word in options)


def _fill(expression: str, slots: Mapping[str, str]) -> str:
    return "".join(fixed if slot is None else slots[slot] for fixed, slot, _ in pieces(expression))


def _pick(spec: TaskSpec, source: str, options: Collection[str], rng: np.random.Generator) -> str:
    if not options:
        raise TaskError(
            f"Task {spec.name}: too few usable words in its list {source!r}. "
            "Add words to the task file, or use a tokenizer that has more of them."
        )
    return tuple(options)[int(rng.integers(len(options)))]
