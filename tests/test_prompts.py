"""Prompts: what a model reads is the text, and the answers are what follows it."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from prompt_samples import (
    KINDS,
    NAMES,
    POSABLE,
    SHIPPED,
    WORDS,
    bare,
    candidates_of,
    labelled_words,
    naming_task,
    same_group,
    sample,
    shipped,
    shipped_pair,
    text_of,
)
from tokenizers_for_tests import byte_level, llama_like, words_of
from transformers import PreTrainedTokenizerFast

from circuitkd._sampling import Drawn, pair_of
from circuitkd._tokenising import Misfit, Reading
from circuitkd.errors import InputError, VocabularyError
from circuitkd.prompts import compared_positions, tokenised
from circuitkd.tasks import Task, task_names


class TestWhatIsRead:
    @pytest.mark.parametrize(("task", "kind"), POSABLE)
    def test_it_is_the_text(self, task: str, kind: str) -> None:
        prompts, tokenizer = shipped(task, kind), KINDS[kind]
        first = 0 if prompts.bos is None else 1
        for group in prompts.groups:
            for rows, texts in (
                (group.clean, group.texts),
                (group.corrupted, group.corrupted_texts),
            ):
                for row, text in zip(rows.tolist(), texts, strict=True):
                    assert bare(text_of(tokenizer, row[first:])) == bare(text)

    @pytest.mark.parametrize("task", task_names())
    def test_it_is_the_text_to_the_letter_where_the_tokenizer_keeps_letters(
        self, task: str
    ) -> None:
        for group in shipped(task, "byte_level").groups:
            for row, text in zip(group.clean.tolist(), group.texts, strict=True):
                assert text_of(KINDS["byte_level"], row) == text

    @pytest.mark.parametrize("task", task_names())
    def test_a_prompt_among_others_reads_as_it_does_alone(self, task: str) -> None:
        # Faults 1 and 10: nothing is padded, shifted or clipped.
        for group in shipped(task, "byte_level").groups:
            for row, text in zip(group.clean.tolist(), group.texts, strict=True):
                assert row == KINDS["byte_level"](text)["input_ids"]

    @pytest.mark.parametrize(("task", "kind"), POSABLE)
    def test_labels_point_to_the_last_token_of_their_word(self, task: str, kind: str) -> None:
        for group in shipped(task, kind).groups:
            for rows, texts in (
                (group.clean, group.texts),
                (group.corrupted, group.corrupted_texts),
            ):
                for row, text in zip(rows.tolist(), texts, strict=True):
                    words = labelled_words(SHIPPED[task], group.template, text)
                    assert set(group.positions) == {*words, "END"}
                    for label, word in words.items():
                        token = bare(text_of(KINDS[kind], [row[int(group.positions[label][0])]]))
                        assert token.removeprefix("##")
                        assert word.lower().endswith(token.removeprefix("##"))

    @pytest.mark.parametrize(("task", "kind"), POSABLE)
    def test_groups_have_one_shape_and_end_at_the_end(self, task: str, kind: str) -> None:
        for group in shipped(task, kind).groups:
            length = group.clean.shape[1]
            assert group.corrupted.shape == group.clean.shape
            assert group.means.shape[1] == length
            assert set(group.positions["END"].tolist()) == {length - 1}
            for position in group.positions.values():
                assert position.shape == (len(group),)
                assert len(set(position.tolist())) == 1

    @pytest.mark.parametrize(("task", "kind"), POSABLE)
    def test_unknown_and_unused_ids_never_occur(self, task: str, kind: str) -> None:
        # Fault 2: special ids are read nowhere but at the beginning.
        prompts, special = shipped(task, kind), set(KINDS[kind].all_special_ids)
        first = 0 if prompts.bos is None else 1
        for group in prompts.groups:
            read = torch.cat([t[:, first:] for t in (group.clean, group.corrupted, group.means)])
            answers = torch.stack([group.correct, group.incorrect])
            assert not special & {*read.flatten().tolist(), *answers.flatten().tolist()}

    def test_every_prompt_is_in_one_group(self) -> None:
        prompts = shipped("ioi", "llama_like")
        assert sorted(torch.cat([g.index for g in prompts.groups]).tolist()) == list(range(15))
        assert len(prompts) == len(prompts.texts) == len(set(prompts.texts)) == 15
        for group in prompts.groups:
            assert group.texts == tuple(prompts.texts[i] for i in group.index.tolist())


class TestAnswers:
    def test_a_number_may_be_one_token_with_its_space(self) -> None:
        tokenizer = KINDS["byte_level"]
        for group in shipped("numerals", "byte_level").groups:
            for row, text, answer in zip(group.clean, group.texts, group.incorrect, strict=True):
                last = labelled_words(SHIPPED["numerals"], group.template, text)["N4"]
                assert text_of(tokenizer, [int(answer)]) == f" {last}"
                assert not text_of(tokenizer, row.tolist()).endswith(" ")

    def test_or_its_space_is_read_and_its_first_digit_answers(self) -> None:
        tokenizer = KINDS["llama_like"]
        for group in shipped("numerals", "llama_like").groups:
            assert set(tokenizer.convert_ids_to_tokens(group.clean[:, -1].tolist())) == {"▁"}
            for text, right, wrong in zip(group.texts, group.correct, group.incorrect, strict=True):
                last = labelled_words(SHIPPED["numerals"], group.template, text)["N4"]
                following = str(int(last) + 1)
                # 13 and 14 share their first digit: read too, unless that makes them unusable.
                assert following[0] != last[0]
                tokens = tokenizer.convert_ids_to_tokens([int(right), int(wrong)])
                assert tokens == [following[0], last[0]]

    @pytest.mark.parametrize("kind", KINDS)
    def test_in_ioi_they_are_the_names(self, kind: str) -> None:
        for group in shipped("ioi", kind).groups:
            at = group.positions
            assert torch.equal(group.correct, take(group.clean, at["IO"]))
            assert torch.equal(group.incorrect, take(group.clean, at["S1"]))
            assert torch.equal(group.incorrect, take(group.clean, at["S2"]))

    def test_the_same_answers_follow_the_corrupted_text(self) -> None:
        tokenizer = KINDS["byte_level"]
        for group in shipped("months", "byte_level").groups:
            for row, text, answer in zip(
                group.corrupted.tolist(), group.corrupted_texts, group.correct, strict=True
            ):
                month = text_of(tokenizer, [int(answer)])
                assert tokenizer(text + month)["input_ids"] == [*row, int(answer)]


def take(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return ids.gather(1, positions[:, None])[:, 0]


class TestCorruption:
    def test_only_the_corrupted_words_differ(self) -> None:
        for group in shipped("ioi", "byte_level").groups:
            differs = group.clean != group.corrupted
            expected = torch.zeros_like(differs)
            for label in ("IO", "S1", "S2"):
                expected.scatter_(1, group.positions[label][:, None], True)
            assert torch.equal(differs, expected)

    def test_only_the_start_year_differs_in_greater_than(self) -> None:
        for group in shipped("greater_than", "byte_level").groups:
            differs = group.clean != group.corrupted
            assert differs.sum(1).tolist() == [1] * len(group)
            assert torch.equal(differs.int().argmax(1), group.positions["YY"])

    def test_words_of_unequal_length_are_exchanged_for_others_of_their_length(self) -> None:
        # Four names are one token, four are several: a corruption must not move any token.
        short, long = NAMES[:4], ["Zebedee", "Quentin", "Xaviera", "Wilhelm"]
        words = [*short, *(name[:3] for name in long), "Then", "and", "met", "smiled", "at"]
        prompts = sample(naming_task([*short, *long]), byte_level(words), n=20)
        lengths = {group.clean.shape[1] for group in prompts.groups}
        assert len(lengths) > 1
        for group in prompts.groups:
            for texts in (group.texts, group.corrupted_texts):
                found = [labelled_words(naming_task([*short, *long]), 0, text) for text in texts]
                assert (
                    len({tuple(word in short for word in words.values()) for words in found}) == 1
                )

    def test_nor_may_it_where_a_word_has_another_length_at_the_start_of_a_text(self) -> None:
        # All are one token after a space; without one only the first three are.
        names = NAMES[:6]
        task = naming_task(names, templates=["{IO} and {S:S1} met, and {S:S2} smiled at"])
        known = [*names[:3], "and", "met", "smiled", "at"]
        tokenizer = byte_level(known, only_after_space=names)
        prompts = sample(task, tokenizer, n=20)
        assert len({group.clean.shape[1] for group in prompts.groups}) > 1
        for group in prompts.groups:
            for text, other in zip(group.texts, group.corrupted_texts, strict=True):
                first, second = text.split()[0], other.split()[0]
                assert len(tokenizer(first)["input_ids"]) == len(tokenizer(second)["input_ids"])

    def test_the_same_answers_must_follow_it(self) -> None:
        clean = Reading((0, 1), (("END", 1),), 7, 8, "to", ((0, 1), (1, 2)))
        prompt = naming_task().draw(np.random.default_rng(0))
        assert isinstance(pair_of(prompt, (clean,), (clean,)), Drawn)
        for change in ({"correct": 9}, {"incorrect": 9}):
            other = replace(clean, **change)
            assert isinstance(pair_of(prompt, (clean,), (other,)), Misfit)

    def test_a_task_without_a_corruption_of_equal_length_is_refused(self) -> None:
        # The two long names are needed together, and no third could replace them.
        task = naming_task(["Zebedee", "Quentin", *NAMES[:1]])
        words = ["Mary", "Zebe", "Quen", "Then", "and", "met", "smiled", "at"]
        with pytest.raises(VocabularyError, match="naming"):
            sample(task, byte_level(words))


class TestMeans:
    def test_there_are_64_of_every_group_drawn_for_it(self) -> None:
        for group in shipped("ioi", "byte_level").groups:
            assert len(group.means) == 64
            assert len({tuple(row) for row in group.means.tolist()}) > 48
            # Same template: the same tokens wherever no slot is.
            template = SHIPPED["ioi"].templates[group.template].text
            fixed = set(re.findall(r"[A-Za-z]+", re.sub(r"\{[^}]*\}", " ", template)))
            for row in group.means.tolist():
                assert fixed <= set(re.findall("[A-Za-z]+", text_of(KINDS["byte_level"], row)))

    def test_they_do_not_depend_on_the_number_of_prompts(self) -> None:
        few, many = (sample(SHIPPED["ioi"], KINDS["llama_like"], n=n) for n in (30, 90))
        means = {group.template: group.means for group in many.groups}
        assert few.groups
        for group in few.groups:
            assert torch.equal(group.means, means[group.template])

    def test_a_rare_shape_gets_corruptions_of_its_own_prompts(self) -> None:
        # Of 25 sequences only X Yy has a second word of two tokens.
        letters = [*"ABCDEFGHIJKLMNOPQRSTUVWX", "Yy", "Zz"]
        run = {name: {"from": "letters", "run": k} for k, name in enumerate(("A", "B", "next"))}
        task = naming_task(
            templates=["So {A:A}, {B:B},"],
            words={"letters": letters},
            slots=run,
            positions=["A", "B"],
            answer=" {next}",
            distractor=" {A}",
            corruption={"redraw": ["A", "B"], "distinct": True, "avoid": "same"},
        )
        tokenizer = byte_level(["So", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
        with pytest.warns(UserWarning, match="24 different prompts"):
            prompts = sample(task, tokenizer, n=30)
        (rare,) = (group for group in prompts.groups if "Yy" in group.texts[0])
        assert rare.means.shape == (64, 6)
        words = [text_of(tokenizer, row).split() for row in rare.means.tolist()]
        assert {second for _, _, second in words} == {"Zz,"}
        assert len({first for _, first, _ in words}) > 15


class TestSetsOfEndings:
    @pytest.mark.parametrize("kind", ["byte_level", "word_level", "word_piece"])
    def test_every_later_year_is_right_and_every_other_wrong(self, kind: str) -> None:
        for group in shipped("greater_than", kind).groups:
            endings = [
                int(text_of(KINDS[kind], [token]).removeprefix("##"))
                for token in candidates_of(group)
            ]
            assert sorted(endings) == list(range(1, 100))
            assert group.valid is not None
            for text, valid, right, wrong in zip(
                group.texts, group.valid, group.correct, group.incorrect, strict=True
            ):
                start = int(labelled_words(SHIPPED["greater_than"], group.template, text)["YY"])
                assert valid.tolist() == [ending > start for ending in endings]
                assert bool(valid[candidates_of(group).index(int(right))])
                assert not bool(valid[candidates_of(group).index(int(wrong))])

    def test_other_tasks_have_none(self) -> None:
        for group in shipped("ioi", "byte_level").groups:
            assert group.candidates is None
            assert group.valid is None

    def test_single_digits_cannot_pose_it(self) -> None:
        with pytest.raises(VocabularyError, match="no token of its own for"):
            sample(SHIPPED["greater_than"], KINDS["llama_like"])

    def test_an_ending_that_merges_with_its_century_is_left_out(self) -> None:
        # " 1776" is one token here, so 76 is no ending of 17; the other centuries keep it.
        tokenizer = byte_level([*WORDS, "1776"])
        prompts = sample(SHIPPED["greater_than"], tokenizer, n=20)
        number = tokenizer.convert_tokens_to_ids("76")
        in_17, elsewhere = set(), set()
        for group in prompts.groups:
            for text in group.texts:
                (in_17 if text.endswith(" 17") else elsewhere).add(number in candidates_of(group))
        assert (in_17, elsewhere) == ({False}, {True})

    def test_two_tokenizers_get_the_same_endings(self) -> None:
        kinds = byte_level([*WORDS, "1776"]), KINDS["word_piece"]
        teacher, student = tokenised(SHIPPED["greater_than"], kinds, 15, 0)
        for ours, theirs in zip(teacher.groups, student.groups, strict=True):
            assert ours.valid is not None
            assert theirs.valid is not None
            assert torch.equal(ours.valid, theirs.valid)
            texts = [
                [text_of(kind, [token]).removeprefix("##") for token in candidates_of(group)]
                for kind, group in zip(kinds, (ours, theirs), strict=True)
            ]
            assert texts[0] == texts[1]


class TestComparedPositions:
    def pair(self, task: Task, *kinds: PreTrainedTokenizerFast, bos: str = "auto"):
        teacher, student = tokenised(task, kinds, 12, 0, bos=bos)
        return zip(teacher.groups, student.groups, strict=True)

    def test_all_of_them_for_one_tokenizer(self) -> None:
        for ours, theirs in self.pair(SHIPPED["ioi"], KINDS["byte_level"], KINDS["byte_level"]):
            for places in compared_positions(ours, theirs):
                assert places.tolist() == [list(range(ours.clean.shape[1]))] * len(ours)

    def test_all_but_the_bos_where_only_one_model_has_one(self) -> None:
        words = words_of(naming_task())
        for ours, theirs in self.pair(naming_task(), byte_level(words), llama_like(words)):
            mine, yours = compared_positions(ours, theirs)
            assert mine[0].tolist() == list(range(10))
            assert yours[0].tolist() == list(range(1, 11))

    def test_the_labelled_ones_where_texts_are_cut_differently(self) -> None:
        teacher, student = shipped_pair("numerals")
        for ours, theirs in zip(teacher.groups, student.groups, strict=True):
            mine, yours = compared_positions(ours, theirs)
            for group, places in ((ours, mine), (theirs, yours)):
                labels = ["N1", "N2", "N3", "N4", "END"]
                assert places.tolist() == [
                    [int(group.positions[label][0]) for label in labels]
                ] * len(group)

    def test_groups_of_other_prompts_are_refused(self) -> None:
        one, two = (sample(naming_task(), KINDS["byte_level"], seed=seed) for seed in (0, 1))
        with pytest.raises(InputError, match="sample_pair"):
            compared_positions(one.groups[0], two.groups[0])


class TestTaking:
    def test_takes_prompts_with_all_that_belongs_to_them(self) -> None:
        whole = sample(SHIPPED["greater_than"], KINDS["word_level"], n=20)
        places = [13, 2, 7]
        part = whole.take(places)
        assert part.texts == tuple(whole.texts[place] for place in places)
        assert part.corrupted_texts == tuple(whole.corrupted_texts[place] for place in places)
        rows = {int(i): (g, row) for g in whole.groups for row, i in enumerate(g.index)}
        for group in part.groups:
            for row, place in enumerate(group.index.tolist()):
                theirs, old = rows[places[place]]
                for name in ("clean", "corrupted", "correct", "incorrect", "valid", "spans"):
                    assert torch.equal(getattr(group, name)[row], getattr(theirs, name)[old])
                assert {k: int(v[row]) for k, v in group.positions.items()} == {
                    k: int(v[old]) for k, v in theirs.positions.items()
                }
                assert torch.equal(group.means, theirs.means)
                assert group.texts[row] == theirs.texts[old]

    def test_all_places_are_the_same_prompts(self) -> None:
        whole = shipped("ioi", "word_level")
        for ours, theirs in zip(whole.take(range(len(whole))).groups, whole.groups, strict=True):
            assert same_group(ours, theirs)

    def test_a_group_without_a_prompt_goes(self) -> None:
        whole = shipped("ioi", "word_level")
        assert len(whole.groups) > 1
        part = whole.take(whole.groups[0].index.tolist())
        assert len(part.groups) == 1
        assert len(part) == len(whole.groups[0])

    @pytest.mark.parametrize("places", [[0, 0], [15], [-1]])
    def test_refuses_places_that_are_not_there_or_twice(self, places: list[int]) -> None:
        with pytest.raises(InputError, match="0 to 14"):
            shipped("ioi", "word_level").take(places)
