"""How one tokenizer reads the texts of a task.

A text is always tokenised whole, answer included, never glued from pieces: what the model reads is
the longest token prefix that ``prompt + correct`` and ``prompt + incorrect`` share, and the answers
are the first tokens that differ. So a tokenizer that splits ``" 5"`` into ``" "`` and ``"5"`` reads
the space and answers ``"5"``, and one that knows ``" 5"`` answers with it at once.

A model that fills in masks reads what both share, then a mask in the place of the answer, which is
one token, and a full stop, between the special tokens of its tokenizer.

What a tokenizer cannot pose honestly is a ``Misfit`` with its reason: unknown words, characters
that it drops, answers that begin alike, and answers that merge with the text before them.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from circuitkd._task_schema import END
from circuitkd.errors import VocabularyError
from circuitkd.tasks import Sentence

NO_SPAN = (-1, -1)
_PROBE = "The a 1"


@dataclass(frozen=True)
class Misfit:
    """Why a prompt cannot be posed."""

    reason: str


@dataclass(frozen=True)
class Reading:
    """One sentence as a model reads it.

    Attributes:
        ids: the tokens, special ones included; the model answers at ``END``.
        positions: (label, index into ``ids``) of every labelled word's last token, and of ``END``:
            the last token, or the mask.
        correct: the first token of the correct answer that the incorrect one does not share.
        incorrect: the same the other way round.
        text: the sentence.
        offsets: the characters of ``text`` that each token covers; ``NO_SPAN`` for special tokens.
    """

    ids: tuple[int, ...]
    positions: tuple[tuple[str, int], ...]
    correct: int
    incorrect: int
    text: str
    offsets: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """What prompts of one group have in common: length and labelled positions."""
        return len(self.ids), self.positions

    @property
    def spans(self) -> list[tuple[int, int]]:
        """``offsets`` without the white space around the words, which tokenizers count or not."""
        spans = []
        for start, stop in self.offsets:
            word = self.text[max(start, 0) : max(stop, 0)]
            start += len(word) - len(word.lstrip())
            spans.append((start, start + len(word.strip())))
        return spans


@dataclass(frozen=True)
class Question:
    """A sentence and the two continuations that are to be told apart."""

    sentence: Sentence
    correct: str
    incorrect: str


@dataclass(frozen=True)
class Reader:
    """A tokenizer with its policy on special tokens. Made by ``open_reader``.

    Attributes:
        tokenizer: the fast tokenizer, with truncation and padding off.
        name: what the tokenizer is called in messages.
        prefix: ids put before every text (the BOS).
        blank: ids put in the place of the answer: an encoder's mask and, if it is known, a full
            stop. Empty for models that answer at their last token.
        suffix: ids put after every text, by an encoder's tokenizer.
        bos: the prefix as text, or ``None``.
        starts: ids that only ever begin a text; a text that brings its own loses it, so that
            ``prefix`` alone decides.
        unknown: ids that stand for any unknown word.
        vocabulary: number of rows of the model's embedding, where a model is known.
    """

    tokenizer: Tokenizer
    name: str
    prefix: tuple[int, ...]
    blank: tuple[int, ...]
    suffix: tuple[int, ...]
    bos: str | None
    starts: frozenset[int]
    unknown: frozenset[int]
    vocabulary: int | None

    def with_specials(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of a text between the special tokens. The only place that adds any."""
        return (*self.prefix, *ids, *self.blank, *self.suffix)

    def encode(self, texts: Sequence[str]) -> list["Encoded"]:
        """Tokenise whole texts, without special tokens.

        Raises:
            VocabularyError: a token id that the model's embedding does not have.
        """
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self._encoded(text, one) for text, one in zip(texts, encodings, strict=True)]

    def _encoded(self, text: str, encoding: Encoding) -> "Encoded":
        ids = encoding.ids
        if self.vocabulary is not None and max(ids, default=0) >= self.vocabulary:
            raise VocabularyError(
                f"The tokenizer {self.name} gives token {max(ids)} for {text!r}, but the model "
                f"knows only {self.vocabulary} tokens: use the model's own tokenizer."
            )
        offsets = encoding.offsets
        first = 0
        while (
            first < len(ids)
            and ids[first] in self.starts
            and self._is_spelt(text, ids[first], offsets[first])
        ):
            first += 1
        begin = offsets[first - 1][1] if first else 0
        return Encoded(text, tuple(ids[first:]), tuple(offsets[first:]), begin)

    def _is_spelt(self, text: str, token: int, span: tuple[int, int]) -> bool:
        """Whether the text itself spells a token out: it does not stand for an unknown word."""
        return _cut(text, span).strip() == self.tokenizer.id_to_token(token)

    def read(self, questions: Sequence[Question]) -> list[Reading | Misfit]:
        """Each question as the model reads it, or why this tokenizer cannot pose it."""
        texts = [q.sentence.text + answer for q in questions for answer in (q.correct, q.incorrect)]
        encoded = self.encode(texts)
        return [
            self._reading(question, encoded[2 * i], encoded[2 * i + 1])
            for i, question in enumerate(questions)
        ]

    def _reading(
        self, question: Question, correct: "Encoded", incorrect: "Encoded"
    ) -> Reading | Misfit:
        length = _shared_length(correct.ids, incorrect.ids)
        flaw = (
            correct.flaw_of_length()
            or incorrect.flaw_of_length()
            or self._flaw_before(len(question.sentence.text), correct, length)
            or self._flaw_of_answer(correct, length)
            or self._flaw_of_answer(incorrect, length)
        )
        if flaw is not None:
            return Misfit(flaw)
        positions: dict[str, int] = {}
        for label, span in question.sentence.spans.items():
            position = _last_token(correct.offsets[:length], span)
            if position is None:
                return Misfit(f"has no token for the word at {label}, {_cut(correct.text, span)!r}")
            positions[label] = position + len(self.prefix)
        ids = self.with_specials(correct.ids[:length])
        positions[END] = len(self.prefix) + length - (0 if self.blank else 1)
        return Reading(
            ids=ids,
            positions=tuple(sorted(positions.items())),
            correct=correct.ids[length],
            incorrect=incorrect.ids[length],
            text=question.sentence.text,
            offsets=(
                *[NO_SPAN] * len(self.prefix),
                *correct.offsets[:length],
                *[NO_SPAN] * (len(self.blank) + len(self.suffix)),
            ),
        )

    def _flaw_before(self, boundary: int, encoded: "Encoded", length: int) -> str | None:
        """What is wrong with the tokens that both continuations of a text share."""
        text, end = encoded.text, encoded.end(length)
        next_start = encoded.offsets[length][0] if length < len(encoded.ids) else len(text)
        replaced = self.blank and length + 1 == len(encoded.ids)  # by the mask, as one word
        if text[next_start:boundary].strip() and not replaced:
            return f"merges the answer with the text before it, in {text[next_start:]!r}"
        if text[end : min(next_start, boundary)].strip():
            return f"has no token for {text[end:boundary].strip()!r}"
        if text[boundary:end].strip():
            return f"begins both answers alike, with {text[boundary:end].strip()!r}"
        if length == 0:
            return f"has nothing to read in {text!r}"
        return self.flaw_within(encoded, 0, length)

    def _flaw_of_answer(self, encoded: "Encoded", length: int) -> str | None:
        """What is wrong with the token that answers: the one after those that are read."""
        answer = encoded.text[encoded.end(length) :].strip()
        if length == len(encoded.ids) or not encoded.token_text(length).strip():
            return f"has no token of its own for the answer {answer!r}"
        if self.blank and length + 1 < len(encoded.ids):
            pieces = len(encoded.ids) - length
            return f"cuts the answer {answer!r} into {pieces} pieces, and a mask stands for one"
        return self.flaw_within(encoded, length, len(encoded.ids))

    def flaw_within(self, encoded: "Encoded", first: int, last: int) -> str | None:
        """The first unknown or dropped word among the tokens ``first`` to ``last`` (exclusive)."""
        end = encoded.end(first)
        for token, (start, stop) in zip(
            encoded.ids[first:last], encoded.offsets[first:last], strict=True
        ):
            dropped = encoded.text[end:start].strip()
            if dropped:
                return f"has no token for {dropped!r}"
            if token in self.unknown:
                return f"does not know {encoded.text[start:stop].strip()!r}"
            end = max(end, stop)
        return None

    def read_endings(self, text: str, endings: Sequence[str], reading: Reading) -> dict[str, int]:
        """The answer token of each ending that this tokenizer can offer after ``reading``.

        An ending is left out when its text is not read as ``reading`` is, when it is unknown, and
        when its first token begins another ending as well: it would stand for both.
        """
        length = len(reading.ids) - len(self.with_specials(()))
        tokens: dict[str, int] = {}
        for ending, encoded in zip(endings, self.encode([text + e for e in endings]), strict=True):
            read_alike = self.with_specials(encoded.ids[:length]) == reading.ids
            if read_alike and self._flaw_of_answer(encoded, length) is None:
                tokens[ending] = encoded.ids[length]
        shared = Counter(tokens.values())
        return {ending: token for ending, token in tokens.items() if shared[token] == 1}


@dataclass(frozen=True)
class Encoded:
    """A text, its tokens, and the characters ``[start, stop)`` that each of them covers.

    ``begin`` is where the first token may start: after a BOS that the text itself spells out.
    """

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    begin: int

    def end(self, length: int) -> int:
        """Where in the text its first ``length`` tokens end."""
        return self.offsets[length - 1][1] if length else self.begin

    def flaw_of_length(self) -> str | None:
        """A tokenizer may drop what it does not know; its tokens then end before the text does."""
        if self.text[self.end(len(self.ids)) :].strip():
            return f"drops some letters of {self.text!r}"
        return None

    def token_text(self, index: int) -> str:
        """The characters that a token covers."""
        return _cut(self.text, self.offsets[index])


def open_reader(
    tokenizer: PreTrainedTokenizerBase,
    bos: str = "auto",
    vocabulary: int | None = None,
    *,
    masked: bool = False,
) -> Reader:
    """Decide once how a tokenizer's special tokens are treated.

    Args:
        tokenizer: a fast Hugging Face tokenizer; it is not changed.
        bos: ``"auto"``: what the tokenizer itself puts before a text (GPT-2: nothing, Llama:
            ``<s>``); ``"none"``: nothing; otherwise the token to put there. Of no effect with
            ``masked``: encoders know no text without their tokenizer's special tokens.
        vocabulary: number of tokens that the model knows.
        masked: the model fills in masks.

    Raises:
        VocabularyError: a slow tokenizer; a BOS that is no token of it, or that the model lacks; no
            mask where one is needed.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise VocabularyError(
            f"The tokenizer {name} is a slow one, which cannot say which characters a token "
            "covers: load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
        )
    backend = _without_truncation(tokenizer.backend_tokenizer)
    unknown = _unknown_ids(tokenizer, backend, name)
    own, suffix = _own_specials(backend)
    prefix = own if masked else _prefix(bos, own, backend, name)
    if vocabulary is not None and max(prefix, default=0) >= vocabulary:
        raise VocabularyError(
            f"The BOS of the tokenizer {name} is token {max(prefix)}, but the model knows only "
            f"{vocabulary} tokens: use bos='none', or the model's own tokenizer."
        )
    special = (backend.token_to_id(str(t)) for t in (tokenizer.bos_token, tokenizer.cls_token) if t)
    return Reader(
        tokenizer=backend,
        name=str(name),
        prefix=prefix,
        blank=_blank(tokenizer, backend, name) if masked else (),
        suffix=suffix if masked else (),
        bos="".join(str(backend.id_to_token(token)) for token in prefix) or None,
        starts=frozenset({*own, *prefix, *(token for token in special if token is not None)}),
        unknown=unknown,
        vocabulary=vocabulary,
    )


def _without_truncation(backend: Tokenizer) -> Tokenizer:
    if backend.truncation is None and backend.padding is None:
        return backend
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _unknown_ids(
    tokenizer: PreTrainedTokenizerFast, backend: Tokenizer, name: str
) -> frozenset[int]:
    """Ids for unknown words; a word-level model without one cannot even be asked."""
    inner = getattr(backend.model, "unk_token", None)
    names = [str(token) for token in (inner, tokenizer.unk_token) if token is not None]
    found = {token: backend.token_to_id(token) for token in names}
    fails = type(backend.model).__name__ in ("WordLevel", "WordPiece")
    if fails and found.get(str(inner)) is None:
        raise VocabularyError(
            f"The tokenizer {name} has no token for unknown words, so it fails at the first one: "
            "add its unknown token to the vocabulary."
        )
    return frozenset(token for token in found.values() if token is not None)


def _own_specials(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer itself puts before a text, and after it."""
    encoding = backend.encode(_PROBE, add_special_tokens=True)
    words = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
    if not words:
        return (), ()
    return tuple(encoding.ids[: words[0]]), tuple(encoding.ids[words[-1] + 1 :])


def _blank(tokenizer: PreTrainedTokenizerFast, backend: Tokenizer, name: str) -> tuple[int, ...]:
    """A mask, and a full stop where the tokenizer knows one: the answer ends a sentence."""
    mask = None if tokenizer.mask_token is None else backend.token_to_id(str(tokenizer.mask_token))
    if mask is None:
        raise VocabularyError(
            f"The tokenizer {name} has no mask token, and an encoder answers at a mask: use the "
            "model's own tokenizer."
        )
    stop = backend.token_to_id(".")
    return (mask,) if stop is None else (mask, stop)


def _prefix(bos: str, own: tuple[int, ...], backend: Tokenizer, name: str) -> tuple[int, ...]:
    if bos == "auto":
        return own
    if bos == "none":
        return ()
    token = backend.token_to_id(bos)
    if token is None:
        raise VocabularyError(
            f"bos={bos!r} is not a token of the tokenizer {name}: use 'auto' (what the tokenizer "
            "itself does), 'none', or one of its tokens."
        )
    return (token,)


def _shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _last_token(offsets: Sequence[tuple[int, int]], span: tuple[int, int]) -> int | None:
    """The last token that covers a character of ``span``."""
    for index in reversed(range(len(offsets))):
        start, stop = offsets[index]
        if start < span[1] and stop > span[0]:
            return index
    return None


def _cut(text: str, span: tuple[int, int]) -> str:
    return text[span[0] : span[1]]
