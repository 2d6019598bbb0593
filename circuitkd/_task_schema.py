"""What a task file may say: the pydantic models behind ``circuitkd.tasks``.

A task is data. Word lists fill slots, slots fill templates, one expression names the answer and
one the distractor, and a corruption says which labelled words are drawn anew. A variant changes
some of that. ``resolve`` applies a variant and gives a task without variants, so that nothing
below this module needs to know that variants exist.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Location = tuple[str | int, ...]

END = "END"
PLACEHOLDER = re.compile(r"\{(\w+)(?::(\w+))?\}")


class LocatedError(ValueError):
    """A fault found by a check across fields; ``location`` is the path of the field at fault."""

    def __init__(self, location: Location, message: str) -> None:
        super().__init__(message)
        self.location = location


def pieces(text: str) -> list[tuple[str, str | None, str | None]]:
    """``text`` cut into (fixed text, slot, label); slot is None for fixed text.

    >>> pieces("{S:S1} saw {IO}")
    [('', 'S', 'S1'), (' saw ', None, None), ('', 'IO', None)]
    """
    found: list[tuple[str, str | None, str | None]] = []
    start = 0
    for match in PLACEHOLDER.finditer(text):
        if match.start() > start:
            found.append((text[start : match.start()], None, None))
        found.append(("", match[1], match[2]))
        start = match.end()
    if start < len(text):
        found.append((text[start:], None, None))
    return found


def slots_in(text: str) -> tuple[str, ...]:
    """The slots of a template or answer expression, in order of first appearance."""
    return tuple(dict.fromkeys(match[1] for match in PLACEHOLDER.finditer(text)))


def map_fixed_text(text: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` applied to everything except its ``{slots}``."""
    parts = re.split(r"(\{[^{}]*\})", text)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class WordList(_Model):
    """Words that may fill a slot; their order matters where a slot uses ``run`` or ``after``."""

    words: tuple[str, ...] = Field(min_length=2)
    cyclic: bool = False
    starts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> "WordList":
        for index, word in enumerate(self.words):
            if not word or word != word.strip() or "{" in word or "}" in word or "\n" in word:
                raise LocatedError(
                    ("words", index),
                    f"{word!r} is not a word; allowed: one line of text without braces and "
                    "without spaces around it",
                )
            if word in self.words[:index]:
                raise LocatedError(("words", index), f"{word!r} is listed twice; allowed: once")
        for index, word in enumerate(self.starts or ()):
            if word not in self.words:
                raise LocatedError(
                    ("starts", index), f"{word!r} is not in the list; allowed: {say(self.words)}"
                )
        return self

    def successor(self, word: str, steps: int = 1) -> str | None:
        """The word ``steps`` after ``word``, or None past the end of a list that is not cyclic."""
        place = self.words.index(word) + steps
        if self.cyclic:
            return self.words[place % len(self.words)]
        return self.words[place] if 0 <= place < len(self.words) else None


class Slot(_Model):
    """Where the word of a slot comes from.

    Plain slots of one list are drawn different from each other. ``run: k`` is the k-th member
    (from 0) of one run of consecutive words, shared by all run slots of the list. ``after`` and
    ``upto`` draw a word later, or not later, in the list than the word of another slot.
    """

    source: str = Field(alias="from")
    run: int | None = Field(default=None, ge=0)
    after: str | None = None
    upto: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Slot":
        if sum(value is not None for value in (self.run, self.after, self.upto)) > 1:
            raise LocatedError((), "allowed: at most one of run, after, upto")
        return self

    @property
    def reference(self) -> str | None:
        """The slot that this one is compared with, if any."""
        return self.after or self.upto


class Template(_Model):
    """A prompt with ``{slot}`` or ``{slot:label}`` places; may have its own answer and redraw."""

    text: str = Field(min_length=1)
    answer: str | None = None
    distractor: str | None = None
    redraw: Mapping[str, str] | None = None


class Corruption(_Model):
    """How the corrupted prompt differs from the clean one, label by label.

    ``redraw`` maps a label to the word list it is drawn from (a plain list of labels means: from
    its slot's own list). ``distinct``: redrawn words differ from each other. ``avoid``: a redrawn
    word is none of the clean words at redrawn labels (``all``), not the clean word of its own
    label (``same``), or anything (``none``). ``no_step: [X, Y]``: the word at Y does not follow
    the one at X in its list. ``set`` puts a fixed word at a label.
    """

    redraw: Mapping[str, str | None] = Field(default_factory=dict)
    distinct: bool = True
    avoid: Literal["all", "same", "none"] = "same"
    no_step: tuple[str, str] | None = None
    set: Mapping[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _labels_alone(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("redraw"), list):
            return {**value, "redraw": {str(label): None for label in value["redraw"]}}
        return value


def _as_word_list(value: Any) -> Any:
    return {"words": value} if isinstance(value, list | tuple) else value


def _as_template(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


WordLists = Mapping[str, Annotated[WordList, BeforeValidator(_as_word_list)]]
Templates = tuple[Annotated[Template, BeforeValidator(_as_template)], ...]


class Variant(_Model):
    """An out-of-distribution version of a task: what differs from the task itself."""

    description: str = Field(min_length=1)
    words: WordLists = Field(default_factory=dict)
    templates: Templates | None = Field(default=None, min_length=1)
    prefix: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    replace: Mapping[str, str] = Field(default_factory=dict)
    case: Literal["lower", "upper"] | None = None


class TaskSpec(_Model):
    """Everything a task file says; ``circuitkd.tasks.Task`` adds checks and drawing to it."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str = Field(min_length=1)
    description: str = Field(min_length=1)
    source: str = Field(min_length=1)
    metric: Literal["logit_difference", "probability_difference"] = "logit_difference"
    positions: tuple[str, ...] = Field(min_length=1)
    word_lists: WordLists = Field(alias="words")
    slots: Mapping[str, Slot] = Field(min_length=1)
    answer: str = Field(min_length=1)
    distractor: str = Field(min_length=1)
    corruption: Corruption
    templates: Templates = Field(min_length=1)
    variants: Mapping[str, Variant] = Field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """All position labels; ``END``, the last token of the prompt, comes last."""
        return (*self.positions, END)

    def label_of(self, slot: str, label: str | None) -> str | None:
        """The label of a placeholder: the one it names, or its slot's name if that is one."""
        return label or (slot if slot in self.positions else None)

    def answer_of(self, template: Template) -> str:
        return self.answer if template.answer is None else template.answer

    def distractor_of(self, template: Template) -> str:
        return self.distractor if template.distractor is None else template.distractor

    def redraw_of(self, template: Template) -> Mapping[str, str]:
        """Label -> the word list that its corrupted word is drawn from."""
        redraw = self.corruption.redraw if template.redraw is None else template.redraw
        placed = {
            self.label_of(slot, label): slot
            for _, slot, label in pieces(template.text)
            if slot is not None
        }
        return {
            label: source or self.slots[placed[label]].source for label, source in redraw.items()
        }


def resolve(spec: TaskSpec, variant: Variant) -> dict[str, Any]:
    """The fields of ``spec`` that ``variant`` changes, with its changes made.

    Order: word lists and templates are replaced; then ``replace`` exchanges whole words of the
    templates' fixed text; then the i-th template gets the i-th prefix (cycling); then ``case``
    changes everything, words and answers included.
    """
    fold = {None: str, "lower": str.lower, "upper": str.upper}[variant.case]
    lists = {name: variant.words.get(name, words) for name, words in spec.word_lists.items()}
    templates = [
        _change_template(template, variant, index, fold)
        for index, template in enumerate(variant.templates or spec.templates)
    ]
    corruption = spec.corruption.model_copy(
        update={"set": {label: fold(word) for label, word in spec.corruption.set.items()}}
    )
    return {
        "word_lists": {name: _fold_list(words, fold) for name, words in lists.items()},
        "templates": tuple(templates),
        "answer": map_fixed_text(spec.answer, fold),
        "distractor": map_fixed_text(spec.distractor, fold),
        "corruption": corruption,
        "variants": {},
    }


def _fold_list(words: WordList, fold: Callable[[str], str]) -> WordList:
    starts = None if words.starts is None else tuple(map(fold, words.starts))
    return WordList(words=tuple(map(fold, words.words)), cyclic=words.cyclic, starts=starts)


def _change_template(
    template: Template, variant: Variant, index: int, fold: Callable[[str], str]
) -> Template:
    def exchange(text: str) -> str:
        return re.sub(r"\w+", lambda match: variant.replace.get(match[0], match[0]), text)

    prefix = variant.prefix[index % len(variant.prefix)] if variant.prefix else ""
    text = prefix + map_fixed_text(template.text, exchange)
    update = {"text": map_fixed_text(text, fold)}
    for name in ("answer", "distractor"):
        if (own := getattr(template, name)) is not None:
            update[name] = map_fixed_text(own, fold)
    return template.model_copy(update=update)


def say(options: Iterable[str]) -> str:
    """Options as people write them.

    >>> say(["a", "b", "c"])
    'a, b or c'
    """
    *first, last = list(options) or ["nothing"]
    return f"{', '.join(first)} or {last}" if first else last
