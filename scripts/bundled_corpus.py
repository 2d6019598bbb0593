"""What the bundled pair is trained on: its tokenizer, and an endless stream of documents.

Everything comes from the task files. The kinds of document, of which a training batch is made:

- task: a clean prompt of a task (never of a variant) with its answer;
- scrambled: a corrupted prompt of a task with a word that it shows: three different names, numbers
  in random order. So the answer cannot be guessed from position or frequency;
- unfinished: a corrupted prompt of a variant, without any answer, so that the words, templates and
  ranges that a task keeps for its variants have trained embeddings and mean nothing by themselves;
- list: words of one list (of a task or variant), counting upwards or said twice in one order.

Held out: a text whose CRC-32 is divisible by 8 is never trained on, and evaluation uses only such
texts.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from circuitkd.tasks import Task

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "[UNK]"
BEGIN, END, MASK, PAD = "[CLS]", "[SEP]", "[MASK]", "[PAD]"  # of the encoders

# Words and punctuation take their leading space along; four digits are two pieces of two.
PIECES = r" ?\p{L}+| ?\d{2}(?=\d{2}(?!\d))| ?\d+| ?[^\s\p{L}\d]+|\s"

HELD_OUT_SHARE = 8
N_POSITIONS = 64

# Shares of the kinds of document, and of the tasks (1 for those not named).
KINDS = {"task": 0.6, "scrambled": 0.12, "unfinished": 0.12, "list": 0.16}
SHARES = {"ioi": 3.0, "greater_than": 0.5}


def is_held_out(text: str) -> bool:
    """Whether ``text`` is kept for evaluation."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


# --- tokenizer ---------------------------------------------------------------------------------


def build_tokenizer(tasks: Mapping[str, Task], *, masked: bool = False) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over every text that the tasks and their variants can make.

    ``masked``: with the special tokens of an encoder, which it puts around every text.
    """
    split = Sequence(
        [
            Split(Regex(PIECES), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found: set[str] = set()
    for text in all_texts(tasks):
        found.update(piece for piece, _ in split.pre_tokenize_str(text))
    special = [PAD, UNKNOWN, BEGIN, END, MASK] if masked else [UNKNOWN, END_OF_TEXT]
    places = {word: i for i, word in enumerate([*special, *sorted(found)])}
    tokenizer = Tokenizer(WordLevel(places, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = ByteLevelDecoder()
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    if masked:
        names = {"cls_token": BEGIN, "sep_token": END, "mask_token": MASK, "pad_token": PAD}
        tokenizer.post_processor = TemplateProcessing(
            single=f"{BEGIN} $A {END}", special_tokens=[(t, places[t]) for t in (BEGIN, END)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        **names,
        model_max_length=N_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The id of a text that is one token."""
    (found,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def all_texts(tasks: Mapping[str, Task]) -> Iterator[str]:
    """Texts that hold every word of every task and variant, with and without a leading space."""
    yield from (" ", "\n", ".", ",", "!", "?")
    for task in tasks.values():
        for variant in (None, *task.variants):
            changed = task.with_variant(variant)
            for words in changed.words().values():
                yield from words
                yield from (f" {word}" for word in words)
            rng = np.random.default_rng(0)
            for index in range(len(changed.templates)):
                prompt = changed.draw(rng, template=index)
                yield from (prompt.clean.text, prompt.corrupted.text)


# --- documents ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A text and what ends it: "" for one whose end is no business of the model's."""

    text: str
    answer: str


@dataclass(frozen=True)
class Batch:
    """Documents padded on the right; padding has no target.

    ``real``: which positions hold text. ``None`` for a causal model, which never sees the padding.
    """

    ids: Int[Tensor, "doc pos"]
    positions: Int[Tensor, "doc pos"]
    label: Int[Tensor, "doc pos"]  # what is to be said at each position
    target: Bool[Tensor, "doc pos"]  # position whose label counts as text
    answer: Bool[Tensor, "doc pos"]  # position that predicts the answer
    real: Bool[Tensor, "doc pos"] | None = None


class Corpus:
    """An endless stream of training documents; its state is its random generator."""

    def __init__(
        self, tasks: Mapping[str, Task], tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        self.tasks = list(tasks.values())
        self.variants = [
            [task.with_variant(variant) for variant in task.variants] for task in self.tasks
        ]
        shares = np.array([SHARES.get(task.name, 1.0) for task in self.tasks])
        self.shares = shares / shares.sum()

    def document(self) -> Document:
        """A document whose text is not held out."""
        while True:
            kind = str(self.rng.choice(list(KINDS), p=list(KINDS.values())))
            index = int(self.rng.choice(len(self.tasks), p=self.shares))
            document = self._draw(kind, index)
            if not is_held_out(document.text):
                return document

    def _draw(self, kind: str, index: int) -> Document:
        if kind == "task":
            prompt = self.tasks[index].draw(self.rng)
            return Document(prompt.clean.text, prompt.correct)
        if kind == "scrambled":
            prompt = self.tasks[index].draw(self.rng)
            shown = [" " + prompt.corrupted.word(label) for label in prompt.corrupted.spans]
            endings = [*prompt.valid, *prompt.invalid] or shown
            return Document(prompt.corrupted.text, self._pick(endings))
        task = self._pick([self.tasks[index], *self.variants[index]])
        if kind == "unfinished":
            return Document(task.draw(self.rng).corrupted.text, "")
        return self._list(task)

    def _list(self, task: Task) -> Document:
        """Words of one list: a run of it where the task uses runs, or an order said twice."""
        name = self._pick(list(task.word_lists))
        words = task.word_lists[name].words
        counted = any(s.run is not None and s.source == name for s in task.slots.values())
        if counted and self.rng.random() < 0.7:
            length = int(self.rng.integers(3, 7))
            last = len(words) if task.word_lists[name].cyclic else len(words) - length
            start = int(self.rng.integers(last))
            said = [words[(start + i) % len(words)] for i in range(length + 1)]
        else:
            length = int(self.rng.integers(2, min(7, len(words)) + 1))
            order = [words[i] for i in self.rng.permutation(len(words))[:length]]
            said = [*order, *order[: int(self.rng.integers(1, length + 1))]]
        return Document(", ".join(said[:-1]) + ",", f" {said[-1]}")

    def _pick(self, options: list[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def batch(self, size: int) -> Batch:
        documents = [self.document() for _ in range(size)]
        encoded = self.tokenizer([each.text + each.answer for each in documents])["input_ids"]
        stop, end = (token_id(self.tokenizer, token) for token in (".", END_OF_TEXT))
        rows, answers, lengths = [], [], []
        for document, ids in zip(documents, encoded, strict=True):
            # Some documents begin with the end of the one before, as in GPT-2's training.
            row = [end, *ids] if self.rng.random() < 0.25 else list(ids)
            answers.append(len(row) - 2 if document.answer else -1)
            rows.append([*row, stop, end] if document.answer else row)
            lengths.append(len(rows[-1]))
        width = max(lengths)
        places = torch.arange(width)
        ids = torch.tensor([row + [end] * (width - len(row)) for row in rows])
        return Batch(
            ids=ids,
            positions=self.positions(size, width),
            label=ids.roll(-1, dims=1),
            target=places < torch.tensor(lengths)[:, None] - 1,
            answer=places == torch.tensor(answers)[:, None],
        )

    def positions(self, size: int, width: int) -> Int[Tensor, "doc pos"]:
        """Half of the documents begin later, so that a position means little by itself."""
        room = [int(self.rng.integers(N_POSITIONS - width + 1)) for _ in range(size)]
        starts = [start if self.rng.random() < 0.5 else 0 for start in room]
        return torch.tensor(starts)[:, None] + torch.arange(width)
