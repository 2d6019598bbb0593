"""Prompts: a task's texts as the tokens of a model.

Prompts are never padded. They are kept in groups of equal template, equal token length and equal
label positions, and every group runs on its own; for a teacher and a student group k holds the
same prompts in the same order for both. Every prompt is checked against its text when it is made:
the last token read ends where the prompt's text ends, white space aside, and the answers are the
tokens that follow there (see ``circuitkd._tokenising``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedTokenizerBase

from circuitkd._sampling import Drawn, Key, Sampler
from circuitkd._task_schema import END
from circuitkd._tokenising import NO_SPAN, open_reader
from circuitkd._vocabulary import usable_words
from circuitkd.errors import InputError
from circuitkd.models import family_of_model, tokenizer_of
from circuitkd.tasks import Task

__all__ = ["PromptGroup", "Prompts", "compared_positions", "sample", "sample_pair", "tokenised"]


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """Prompts of one shape. All tensors are int64 (``valid``: bool) on the CPU.

    Attributes:
        template: index of the template within the task or variant.
        clean: token ids, special ones included; the model answers at position ``answer``.
        corrupted: the same prompts with other words at the corrupted slots.
        correct: token id of the correct answer.
        incorrect: token id of the answer that it is compared with.
        positions: label -> position of the last token of its word, the same in ``clean`` and
            ``corrupted``; ``END`` is that of the answer.
        texts: the clean prompts.
        corrupted_texts: the corrupted ones.
        index: place of each prompt in sampling order, 0 to n - 1 over all groups.
        means: at least 64 corrupted prompts of this template and shape, drawn to average over.
        candidates: for metrics over sets, the token ids of all right and wrong endings.
        valid: which candidates are right, prompt by prompt.
        spans: characters ``[start, stop)`` of the clean text that each position reads, without
            the space around them; -1 for special tokens. ``None`` in a group made by hand.
        answer: the position of the answer: the last one (-1), or that of an encoder's mask.
    """

    template: int
    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    correct: Int[Tensor, "batch"]
    incorrect: Int[Tensor, "batch"]
    positions: Mapping[str, Int[Tensor, "batch"]]
    texts: tuple[str, ...]
    corrupted_texts: tuple[str, ...]
    index: Int[Tensor, "batch"]
    means: Int[Tensor, "mean pos"]
    candidates: Int[Tensor, "candidate"] | None = None
    valid: Bool[Tensor, "batch candidate"] | None = None
    spans: Int[Tensor, "batch pos 2"] | None = None
    answer: int = -1

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        labels = ", ".join(f"{label} {int(at[0])}" for label, at in self.positions.items())
        return (
            f"PromptGroup(template {self.template}: {len(self)} prompts of "
            f"{self.clean.shape[1]} tokens; {labels})"
        )


@dataclass(frozen=True, eq=False)
class Prompts:
    """A sample of a task's prompts, tokenised for one model.

    Attributes:
        task: the task's name.
        variant: its out-of-distribution variant, or ``None``.
        metric: ``"logit_difference"`` or ``"probability_difference"``.
        bos: the token that was put before every text, or ``None``.
        seed: the seed they were drawn with.
        groups: the prompts, by template and shape.
        source: the task they were drawn from.
    """

    task: str
    variant: str | None
    metric: str
    bos: str | None
    seed: int
    groups: tuple[PromptGroup, ...]
    source: Task | None = None

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def texts(self) -> tuple[str, ...]:
        """The clean prompts in sampling order."""
        return self._in_order([group.texts for group in self.groups])

    @property
    def corrupted_texts(self) -> tuple[str, ...]:
        """The corrupted prompts in sampling order."""
        return self._in_order([group.corrupted_texts for group in self.groups])

    def take(self, places: Iterable[int]) -> "Prompts":
        """The prompts at these places of the sampling order, renumbered in the order given.

        Groups keep the corrupted prompts that they average over; a group without a prompt goes.
        With the same places, the two halves of a ``sample_pair`` stay the same prompts.

        Raises:
            InputError: a place that is not there, or is given twice.

        >>> from circuitkd import load_model, load_task
        >>> prompts = load_task("weekdays").sample(load_model("tiny-teacher"), n=10)
        >>> half = prompts.take(range(5, 10))
        >>> half.texts == prompts.texts[5:]
        True
        """
        places = list(places)
        new = {old: place for place, old in enumerate(places)}
        if len(new) < len(places) or not set(new) <= set(range(len(self))):
            raise InputError(f"There are prompts 0 to {len(self) - 1}, each to be taken once.")
        groups = (_taken(group, new) for group in self.groups)
        return replace(self, groups=tuple(group for group in groups if len(group)))

    def _in_order(self, texts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        placed = {
            int(place): text
            for group, own in zip(self.groups, texts, strict=True)
            for place, text in zip(group.index, own, strict=True)
        }
        return tuple(placed[place] for place in sorted(placed))

    def describe(self) -> str:
        """What was sampled, a line for each group with its first prompt."""
        variant = f", variant {self.variant}" if self.variant else ""
        different = len(set(self.texts))
        repeats = "" if different == len(self) else f" ({different} different ones)"
        head = (
            f"{_number(len(self), 'prompt')}{repeats} of task {self.task}{variant}, "
            f"seed {self.seed}, BOS {self.bos or 'none'}, in {_number(len(self.groups), 'group')}:"
        )
        return "\n".join([head, *(f"  {group!r}\n    {group.texts[0]}" for group in self.groups)])

    def __repr__(self) -> str:
        lengths = sorted({group.clean.shape[1] for group in self.groups})
        span = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        variant = f", variant={self.variant!r}" if self.variant else ""
        return (
            f"Prompts(task={self.task!r}{variant}, {_number(len(self), 'prompt')} in "
            f"{_number(len(self.groups), 'group')}, {span} tokens, bos={self.bos!r}, "
            f"seed={self.seed})"
        )


def _taken(group: PromptGroup, new: Mapping[int, int]) -> PromptGroup:
    """The prompts of a group whose places ``new`` knows, with their new places."""
    rows = [row for row, place in enumerate(group.index.tolist()) if place in new]
    index = torch.tensor([new[int(group.index[row])] for row in rows], dtype=torch.int64)
    tensors = ("clean", "corrupted", "correct", "incorrect", "valid", "spans")
    per_prompt = {name: getattr(group, name) for name in tensors}
    return replace(
        group,
        index=index,
        positions={label: at[rows] for label, at in group.positions.items()},
        texts=tuple(group.texts[row] for row in rows),
        corrupted_texts=tuple(group.corrupted_texts[row] for row in rows),
        **{name: values[rows] for name, values in per_prompt.items() if values is not None},
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def sample(
    task: Task,
    model: TransformerBridge,
    n: int = 100,
    seed: int = 0,
    *,
    variant: str | None = None,
    bos: str = "auto",
) -> Prompts:
    """``n`` prompts of a task for one model: ``task.sample(model, ...)``.

    Args:
        task: from ``load_task``.
        model: from ``load_model``, with a tokenizer.
        n: number of prompts, all different where the task has that many (a warning if not). The
            first prompts of a larger sample are those of a smaller one.
        seed: the same seed gives the same prompts.
        variant: an out-of-distribution variant of the task.
        bos: ``"auto"``: what the tokenizer itself does; ``"none"``; or a token to begin with. An
            encoder always reads its tokenizer's own special tokens.

    Raises:
        InputError: ``n`` or ``seed`` out of range.
        ModelError: the model has no tokenizer.
        VocabularyError: the tokenizer cannot pose the task.

    >>> from circuitkd import load_model, load_task
    >>> prompts = load_task("weekdays").sample(load_model("tiny-teacher"), n=10)
    >>> len(prompts), prompts.metric
    (10, 'logit_difference')
    >>> group = prompts.groups[0]
    >>> bool((group.positions["END"] == group.clean.shape[1] - 1).all())
    True
    """
    (prompts,) = tokenised(
        task,
        [tokenizer_of(model)],
        n,
        seed,
        variant=variant,
        bos=bos,
        vocabularies=[int(model.cfg.d_vocab)],
        masked=[family_of_model(model).masked],
    )
    return prompts


def sample_pair(
    task: Task,
    teacher: TransformerBridge,
    student: TransformerBridge,
    n: int = 100,
    seed: int = 0,
    *,
    variant: str | None = None,
    bos: str = "auto",
) -> tuple[Prompts, Prompts]:
    """The same ``n`` prompts for two models, with words that work for both; see ``sample``.

    Group k of the one holds the same prompts in the same order as group k of the other.

    >>> from circuitkd import load_model, load_task
    >>> models = load_model("tiny-teacher"), load_model("tiny-student")
    >>> teacher, student = load_task("weekdays").sample_pair(*models, n=10)
    >>> teacher.texts == student.texts
    True
    """
    teacher_prompts, student_prompts = tokenised(
        task,
        [tokenizer_of(teacher), tokenizer_of(student)],
        n,
        seed,
        variant=variant,
        bos=bos,
        vocabularies=[int(model.cfg.d_vocab) for model in (teacher, student)],
        masked=[family_of_model(model).masked for model in (teacher, student)],
    )
    return teacher_prompts, student_prompts


def tokenised(
    task: Task,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    n: int = 100,
    seed: int = 0,
    *,
    variant: str | None = None,
    bos: str = "auto",
    vocabularies: Sequence[int | None] | None = None,
    masked: Sequence[bool] | None = None,
) -> tuple[Prompts, ...]:
    """The same ``n`` prompts for each of some tokenizers; what ``sample`` is made of.

    ``vocabularies`` are the numbers of tokens that the models know, in order; ``None`` for any.
    ``masked`` says which of the models fill in a mask; by default none. For the rest see
    ``sample``.
    """
    _check(n, seed)
    limits = vocabularies or [None] * len(tokenizers)
    readers = tuple(
        open_reader(tokenizer, bos, limit, masked=fills)
        for tokenizer, limit, fills in zip(
            tokenizers, limits, masked or [False] * len(tokenizers), strict=True
        )
    )
    plain = task.with_variant(variant)
    sampler = Sampler(plain, readers, usable_words(plain, readers), seed)
    groups: dict[Key, list[tuple[int, Drawn]]] = {}
    for place, drawn in enumerate(sampler.sample(n)):
        groups.setdefault(drawn.key, []).append((place, drawn))
    means = sampler.means({key: [drawn for _, drawn in own] for key, own in groups.items()})
    return tuple(
        Prompts(
            task=task.name,
            variant=variant,
            metric=task.metric,
            bos=reader.bos,
            seed=seed,
            groups=tuple(_group(which, groups[key], means[key]) for key in sorted(groups)),
            source=task,
        )
        for which, reader in enumerate(readers)
    )


def _check(n: int, seed: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"n={n!r} is no number of prompts: use 1 or more.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed={seed!r} is no seed: use a whole number, 0 or more.")


def _group(which: int, placed: Sequence[tuple[int, Drawn]], means: Sequence[Drawn]) -> PromptGroup:
    """The tensors of one group for reader number ``which``."""
    drawn = [each for _, each in placed]
    clean = [each.clean[which] for each in drawn]
    endings = drawn[0].endings
    labels = dict(clean[0].positions)
    at_end = labels[END] == len(clean[0].ids) - 1
    return PromptGroup(
        template=drawn[0].prompt.template,
        clean=torch.tensor([reading.ids for reading in clean]),
        corrupted=torch.tensor([each.corrupted[which].ids for each in drawn]),
        correct=torch.tensor([reading.correct for reading in clean]),
        incorrect=torch.tensor([reading.incorrect for reading in clean]),
        positions={
            label: torch.full((len(drawn),), position)
            for label, position in sorted(labels.items(), key=lambda item: item[1])
        },
        texts=tuple(each.prompt.clean.text for each in drawn),
        corrupted_texts=tuple(each.prompt.corrupted.text for each in drawn),
        index=torch.tensor([place for place, _ in placed]),
        means=torch.tensor([each.corrupted[which].ids for each in means]),
        candidates=torch.tensor([tokens[which] for _, tokens in endings]) if endings else None,
        valid=torch.tensor([[e in each.prompt.valid for e, _ in endings] for each in drawn])
        if endings
        else None,
        spans=torch.tensor([reading.spans for reading in clean]),
        answer=-1 if at_end else labels[END],
    )


def compared_positions(
    teacher: PromptGroup, student: PromptGroup
) -> tuple[Int[Tensor, "batch compared"], Int[Tensor, "batch compared"]]:
    """Positions at which two models read the same place of the same texts.

    Args:
        teacher: a group of the teacher's prompts.
        student: the student's group of the same number, from the same ``sample_pair``.

    Returns:
        Teacher's and student's positions, the k-th of one belonging to the k-th of the other.
        Where both cut every text of the group into the same words and end it alike (with the last
        word, or with a mask) these are all positions, a BOS only if both have one; elsewhere those
        of the labels, ``END`` included, in text order.

    Raises:
        InputError: the groups hold different prompts.
    """
    if teacher.texts != student.texts or set(teacher.positions) != set(student.positions):
        raise InputError("The two groups hold different prompts: take both from one sample_pair.")
    pairs = _all_positions(teacher, student) or _labelled_positions(teacher, student)
    ours, theirs = (torch.tensor(list(side)) for side in zip(*pairs, strict=True))
    size = (len(teacher), len(pairs))
    return ours.expand(size).clone(), theirs.expand(size).clone()


def _all_positions(teacher: PromptGroup, student: PromptGroup) -> list[tuple[int, int]] | None:
    """All positions in pairs, or ``None`` where the texts are cut differently."""
    lengths = teacher.clean.shape[1], student.clean.shape[1]
    ours, theirs = teacher.spans, student.spans
    if ours is None or theirs is None:
        same = torch.equal(teacher.clean, student.clean)
        return [(position, position) for position in range(lengths[0])] if same else None
    starts = [_leading_specials(spans[0]) for spans in (ours, theirs)]
    if not torch.equal(ours[:, starts[0] :], theirs[:, starts[1] :]):
        return None
    kept = (range(start - min(starts), end) for start, end in zip(starts, lengths, strict=True))
    return list(zip(*kept, strict=True))


def _leading_specials(spans: Int[Tensor, "pos 2"]) -> int:
    words = (spans[:, 0] != NO_SPAN[0]).nonzero()
    return int(words[0]) if len(words) else len(spans)


def _labelled_positions(teacher: PromptGroup, student: PromptGroup) -> list[tuple[int, int]]:
    pairs = {
        (int(teacher.positions[label][0]), int(student.positions[label][0]))
        for label in teacher.positions
    }
    return sorted(pairs)
