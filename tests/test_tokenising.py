"""How a tokenizer reads a text: BOS, boundaries, and what cannot be posed."""

from collections.abc import Sequence

import pytest
import torch
from prompt_samples import (
    NAMES,
    naming_task,
    same_group,
    sample,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_for_tests import byte_level, llama_like, word_level, word_piece, words_of
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from circuitkd._tokenising import Misfit, Question, Reading, open_reader
from circuitkd._vocabulary import usable_words
from circuitkd.errors import VocabularyError
from circuitkd.prompts import tokenised
from circuitkd.tasks import Sentence


class TestWhatCannotBePosed:
    """The rules of reading, on tokenizers small enough to know every merge."""

    def read(
        self, tokens: Sequence[str], text: str, correct: str, incorrect: str
    ) -> Reading | Misfit:
        """``text`` as read by a byte-level tokenizer with ``tokens`` beside single letters."""
        (reading,) = open_reader(hand_made(tokens)).read(
            [Question(Sentence(text, {}), correct, incorrect)]
        )
        return reading

    def test_answers_that_begin_alike(self) -> None:
        found = self.read(["ĠMar", "in"], "to", " Mark", " Marin")
        assert found == Misfit("begins both answers alike, with 'Mar'")

    def test_an_answer_that_begins_the_other(self) -> None:
        assert isinstance(self.read(["ĠMar"], "to", " Mar", " Mark"), Misfit)

    def test_an_answer_that_merges_with_the_text_before_it(self) -> None:
        found = self.read(["17", "174", "1745"], "in 17", "45", "33")
        assert found == Misfit("merges the answer with the text before it, in '1745'")

    def test_a_space_may_be_cut_off_and_belong_to_the_answer(self) -> None:
        found = self.read(["ĠM", "ĠJ"], "to ", "M", "J")
        assert isinstance(found, Reading)
        assert (len(found.ids), found.spans[-1]) == (2, (1, 2))

    def test_an_answer_that_begins_with_a_bare_space(self) -> None:
        found = self.read(["ĠM"], "to", " M", " J")
        assert isinstance(found, Misfit)
        assert "no token of its own for the answer 'J'" in found.reason

    def test_a_character_that_the_tokenizer_drops(self) -> None:
        core = Tokenizer(models.BPE(vocab={"t": 0, "o": 1, "M": 2, "J": 3, " ": 4}, merges=[]))
        reader = open_reader(PreTrainedTokenizerFast(tokenizer_object=core))
        for text in ("t?o", "to?", "?to"):
            (found,) = reader.read([Question(Sentence(text, {}), " M", " J")])
            assert found == Misfit(f"drops some letters of {text + ' M'!r}")

    def test_half_a_letter_is_no_answer(self) -> None:
        # É and È share their first byte, which is therefore in what is read.
        assert isinstance(self.read([], "to", "É", "È"), Misfit)

    def test_a_word_within_a_token_is_found_there(self) -> None:
        reader = open_reader(hand_made(["Ġa,", "Ġa"]))
        (found,) = reader.read([Question(Sentence("to a, b", {"A": (3, 4)}), "c", "d")])
        assert isinstance(found, Reading)
        assert dict(found.positions) == {"A": 2, "END": 4}


def hand_made(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Single bytes and ``tokens``, built letter by letter in the order given."""
    merges = {(token[:end], token[end]): None for token in tokens for end in range(1, len(token))}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    # Not cut at punctuation, so that a token may span it.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=core)


class TestMasks:
    """A mask stands for one token, the whole of it."""

    def read(self, tokens: Sequence[str], text: str, correct: str, incorrect: str) -> Reading:
        tokenizer = hand_made(tokens)
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        reader = open_reader(tokenizer, masked=True)
        (reading,) = reader.read([Question(Sentence(text, {}), correct, incorrect)])
        if isinstance(reading, Misfit):
            raise AssertionError(reading.reason)
        names = [str(tokenizer.convert_ids_to_tokens(token)) for token in reading.ids]
        assert names[-2:] == ["<mask>", "."]
        assert dict(reading.positions)["END"] == len(names) - 2
        assert [span for span in reading.spans if span == (-1, -1)] == reading.spans[-2:]
        return reading

    def test_the_mask_comes_where_the_answer_was(self) -> None:
        found = self.read(["ĠMary", "ĠJohn"], "to", " Mary", " John")
        assert len(found.ids) == len("to") + 2
        assert found.correct != found.incorrect

    def test_an_answer_of_two_tokens(self) -> None:
        with pytest.raises(AssertionError, match="cuts the answer 'Mark' into 2 pieces"):
            self.read(["ĠMar", "ĠJohn"], "to", " Mark", " John")

    def test_an_answer_merged_with_the_text_before_it_is_masked_with_it(self) -> None:
        found = self.read(["17", "174", "1745", "173", "1733"], "in 17", "45", "33")
        assert len(found.ids) == len("in ") + 2

    def test_but_not_where_it_takes_two_tokens(self) -> None:
        with pytest.raises(AssertionError, match="merges the answer"):
            self.read(["17", "174", "173"], "in 17", "45", "33")

    def test_answers_of_several_tokens_are_left_out_of_the_word_lists(self) -> None:
        task = naming_task()
        tokenizer = byte_level([word for word in words_of(task) if word != NAMES[0]])
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        for masked in (False, True):
            found = usable_words(task, [open_reader(tokenizer, masked=masked)])
            assert ("a mask stands for one" in found.unknown.get(NAMES[0], "")) == masked


class TestBos:
    """Faults 3 and 4: one BOS where the policy says so, none elsewhere, and it is told."""

    TASK = naming_task()
    WORDS = words_of(TASK)

    @pytest.mark.parametrize(
        ("build", "policy", "expected"),
        [
            (byte_level, "auto", None),
            (lambda words: byte_level(words, adds_bos=True), "auto", "<|endoftext|>"),
            (lambda words: byte_level(words, adds_bos=True), "none", None),
            (byte_level, "<|endoftext|>", "<|endoftext|>"),
            (llama_like, "auto", "<s>"),
            (llama_like, "none", None),
            (llama_like, "</s>", "</s>"),
            (word_level, "auto", None),
            (word_piece, "auto", "[CLS]"),
            (word_piece, "none", None),
        ],
    )
    def test_a_policy_is_kept(self, build, policy: str, expected: str | None) -> None:
        tokenizer = build(self.WORDS)
        prompts = sample(self.TASK, tokenizer, bos=policy)
        assert prompts.bos == expected
        special = torch.tensor(tokenizer.all_special_ids)
        for group in prompts.groups:
            for rows in (group.clean, group.corrupted, group.means):
                found = torch.isin(rows, special)
                assert not found[:, 1:].any()
                assert found[:, 0].all() if expected else not found[:, 0].any()
            if expected is not None:
                assert set(group.clean[:, 0].tolist()) == {
                    tokenizer.convert_tokens_to_ids(expected)
                }

    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_a_text_that_brings_its_own_gets_no_second_one(self, adds_bos: bool) -> None:
        template = "<|endoftext|>Then {IO} and {S:S1} met, and {S:S2} smiled at"
        task = naming_task(templates=[template])
        tokenizer = byte_level(self.WORDS, adds_bos=adds_bos)
        own = sample(self.TASK, tokenizer, bos="<|endoftext|>")
        for policy, bos in (("<|endoftext|>", 1), ("none", 0)):
            for group in sample(task, tokenizer, bos=policy).groups:
                found = torch.isin(group.clean, torch.tensor(tokenizer.all_special_ids))
                assert found.sum(1).tolist() == [bos] * len(group)
                if bos:
                    assert torch.equal(group.clean, own.groups[0].clean)
                    assert group.positions.keys() == own.groups[0].positions.keys()

    def test_a_bos_moves_every_position_by_one(self) -> None:
        tokenizer = llama_like(self.WORDS)
        without, with_bos = (sample(self.TASK, tokenizer, bos=bos) for bos in ("none", "auto"))
        assert without.texts == with_bos.texts
        for one, other in zip(without.groups, with_bos.groups, strict=True):
            assert torch.equal(one.clean, other.clean[:, 1:])
            for label, position in one.positions.items():
                assert torch.equal(position + 1, other.positions[label])

    def test_a_bos_that_is_no_token_is_refused(self) -> None:
        with pytest.raises(VocabularyError, match=r"'<bos>' is not a token .* 'none'"):
            sample(self.TASK, byte_level(self.WORDS), bos="<bos>")

    def test_an_unknown_first_word_is_not_taken_for_a_bos(self) -> None:
        core = Tokenizer(models.WordLevel({"<s>": 0, "to": 1, "M": 2, "J": 3}, "<s>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<s>", bos_token="<s>")
        (found,) = open_reader(tokenizer).read([Question(Sentence("Hey to", {}), " M", " J")])
        assert found == Misfit("does not know 'Hey'")


class TestTokenizers:
    def test_a_slow_one_is_refused(self) -> None:
        class Slow(PreTrainedTokenizer):
            @property
            def vocab_size(self) -> int:
                return 1

            def get_vocab(self) -> dict[str, int]:
                return {"a": 0}

        with pytest.raises(VocabularyError, match="slow"):
            open_reader(Slow())

    def test_one_that_fails_at_unknown_words_is_refused(self) -> None:
        with pytest.raises(VocabularyError, match="no token for unknown words"):
            sample(naming_task(), word_level(words_of(naming_task()), unknown=False))

    def test_saved_truncation_and_padding_do_nothing_and_stay(self) -> None:
        tokenizer = byte_level(words_of(naming_task()))
        plain = sample(naming_task(), tokenizer)
        tokenizer.backend_tokenizer.enable_truncation(4)
        tokenizer.backend_tokenizer.enable_padding(length=50)
        clipped = sample(naming_task(), tokenizer)
        assert same_group(plain.groups[0], clipped.groups[0])
        assert (tokenizer.backend_tokenizer.truncation or {})["max_length"] == 4

    def test_more_tokens_than_the_model_knows_is_an_error(self) -> None:
        with pytest.raises(VocabularyError, match="knows only 300 tokens"):
            tokenised(naming_task(), [byte_level(words_of(naming_task()))], 5, vocabularies=[300])

    def test_a_bos_that_the_model_does_not_know_is_an_error(self) -> None:
        tokenizer = byte_level(words_of(naming_task()))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<begin>"]})
        limit = len(tokenizer) - 1
        with pytest.raises(VocabularyError, match="BOS"):
            tokenised(naming_task(), [tokenizer], 5, bos="<begin>", vocabularies=[limit])
