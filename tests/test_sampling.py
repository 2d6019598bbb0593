"""Sampling: which words and prompts are drawn, for one tokenizer or for two."""

import warnings

import pytest
import torch
from prompt_samples import (
    KINDS,
    NAMES,
    SHIPPED,
    naming_task,
    same_group,
    sample,
    shipped_pair,
    text_of,
)
from random_models import random_gpt2
from tokenizers_for_tests import byte_level, llama_like, word_level, word_piece, words_of

from circuitkd import load_model
from circuitkd.errors import InputError, ModelError, VocabularyError
from circuitkd.prompts import tokenised


class TestSampling:
    def test_the_same_seed_gives_the_same_prompts(self) -> None:
        one, two = (sample(SHIPPED["months"], KINDS["llama_like"], seed=3) for _ in range(2))
        assert len(one.groups) == len(two.groups)
        assert all(same_group(a, b) for a, b in zip(one.groups, two.groups, strict=True))

    def test_another_seed_gives_others(self) -> None:
        one, two = (sample(SHIPPED["ioi"], KINDS["byte_level"], seed=seed) for seed in (0, 1))
        assert not set(one.texts) & set(two.texts)

    @pytest.mark.parametrize("n", [1, 7, 65])
    def test_the_first_prompts_of_many_are_those_of_few(self, n: int) -> None:
        few = sample(SHIPPED["weekdays"], KINDS["byte_level"], n=n)
        many = sample(SHIPPED["weekdays"], KINDS["byte_level"], n=100)
        assert len(few) == n
        assert few.texts == many.texts[:n]
        assert few.corrupted_texts == many.corrupted_texts[:n]

    def test_no_prompt_comes_twice_while_there_are_others(self) -> None:
        # 9 · 8 ordered pairs of names in one template
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prompts = sample(naming_task(), byte_level(words_of(naming_task())), n=72)
        assert len(set(prompts.texts)) == 72

    def test_when_there_are_none_left_it_says_so_and_corrupts_them_differently(self) -> None:
        with pytest.warns(UserWarning, match="naming has only 72 different prompts"):
            prompts = sample(naming_task(), byte_level(words_of(naming_task())), n=100)
        assert len(prompts) == 100
        assert prompts.texts[72:] == prompts.texts[:28]
        pairs = set(zip(prompts.texts, prompts.corrupted_texts, strict=True))
        assert len(pairs) > 90
        assert "100 prompts (72 different ones)" in prompts.describe()

    @pytest.mark.parametrize("variant", sorted(SHIPPED["ioi"].variants))
    def test_variants_are_sampled_too(self, variant: str) -> None:
        (prompts,) = tokenised(SHIPPED["ioi"], [KINDS["byte_level"]], 9, variant=variant)
        assert (prompts.variant, len(prompts)) == (variant, 9)
        assert variant in prompts.describe()

    @pytest.mark.parametrize("n", [0, -3, True])
    def test_an_empty_sample_is_refused(self, n: int) -> None:
        with pytest.raises(InputError, match="use 1 or more"):
            sample(SHIPPED["ioi"], KINDS["byte_level"], n=n)

    def test_a_negative_seed_is_refused(self) -> None:
        with pytest.raises(InputError, match="seed"):
            sample(SHIPPED["ioi"], KINDS["byte_level"], seed=-1)

    def test_a_sample_prints_itself(self) -> None:
        prompts = sample(naming_task(), llama_like(words_of(naming_task())), n=5)
        assert repr(prompts) == (
            "Prompts(task='naming', 5 prompts in 1 group, 11 tokens, bos='<s>', seed=0)"
        )
        assert "IO 2, S1 4, S2 8, END 10" in prompts.describe()
        assert prompts.texts[0] in prompts.describe()


class TestWords:
    def test_a_few_long_names_are_left_out(self) -> None:
        long = ["Tomaso", "Annika"]
        prompts = sample(naming_task([*NAMES, *long]), byte_level(words_of(naming_task())), n=72)
        assert len(prompts.groups) == 1
        assert not any(name in text for text in prompts.texts for name in long)

    def test_but_not_when_too_few_would_remain(self) -> None:
        short, long = NAMES[:7], ["Tomaso", "Annika"]
        prompts = sample(naming_task([*short, *long]), byte_level(words_of(naming_task())), n=30)
        assert any(name in text for text in prompts.texts for name in long)

    def test_words_that_begin_a_text_have_one_length_there_too(self) -> None:
        # All are one token after a space; at the start of a text only the first eight are.
        known, others = NAMES[:8], ["Zoe", "Quinn"]
        task = naming_task(
            [*known, *others], templates=["{IO} and {S:S1} met, and {S:S2} smiled at"]
        )
        tokenizer = byte_level([*known, "and", "met", "smiled", "at"], only_after_space=others)
        prompts = sample(task, tokenizer, n=50)
        assert len(prompts.groups) == 1
        assert not any(name in text for text in prompts.texts for name in others)

    @pytest.mark.parametrize("build", [word_level, word_piece])
    def test_unknown_words_are_never_used(self, build) -> None:
        task = naming_task([*NAMES, "Zebedee"])
        prompts = sample(task, build(words_of(naming_task())), n=72)
        assert not any("Zebedee" in text for text in (*prompts.texts, *prompts.corrupted_texts))

    def test_a_template_with_an_unknown_word_is_never_used(self) -> None:
        templates = [
            "Then {IO} and {S:S1} met, and {S:S2} {}at".replace("{}", verb)
            for verb in ("smiled ", "grimaced ")
        ]
        prompts = sample(naming_task(templates=templates), word_level(words_of(naming_task())))
        assert {group.template for group in prompts.groups} == {0}

    def test_too_few_known_words_is_an_error_that_names_them(self) -> None:
        tokenizer = word_level(["Then", "and", "met", "smiled", "at", "Mary", "John"])
        tokenizer.name_or_path = "my-tokenizer"
        with pytest.raises(VocabularyError) as caught:
            sample(naming_task(), tokenizer)
        for part in ("naming", "my-tokenizer", "'Tom'", "'Lucy'"):
            assert part in str(caught.value)

    def test_names_that_all_begin_alike_is_an_error_that_says_so(self) -> None:
        names = ["Marta", "Marla", "Marvin", "Margot", "Marcus"]
        tokenizer = byte_level(["Mar", "Then", "and", "met", "smiled", "at"])
        with pytest.raises(VocabularyError, match="begins both answers alike, with 'Mar'"):
            sample(naming_task(names), tokenizer)


class TestTwoTokenizers:
    @pytest.mark.parametrize("task", ["ioi", "numerals", "months"])
    def test_both_hold_the_same_prompts_in_the_same_groups(self, task: str) -> None:
        kinds = KINDS["byte_level"], KINDS["llama_like"]
        teacher, student = shipped_pair(task)
        assert teacher.texts == student.texts
        assert (teacher.bos, student.bos) == (None, "<s>")
        for ours, theirs in zip(teacher.groups, student.groups, strict=True):
            assert ours.texts == theirs.texts
            assert ours.corrupted_texts == theirs.corrupted_texts
            assert torch.equal(ours.index, theirs.index)
            for mine, yours in zip(ours.means.tolist(), theirs.means.tolist(), strict=True):
                assert text_of(kinds[0], mine) == text_of(kinds[1], yours[1:]).strip()

    def test_one_tokenizer_twice_gives_the_same_tensors(self) -> None:
        kind = KINDS["word_piece"]
        teacher, student = tokenised(SHIPPED["numerals"], [kind, kind], 20, 0)
        alone = sample(SHIPPED["numerals"], kind)
        for groups in zip(teacher.groups, student.groups, alone.groups, strict=True):
            assert same_group(groups[0], groups[1])
            assert same_group(groups[0], groups[2])

    def test_only_words_that_work_for_both_are_used(self) -> None:
        fillers = ["Then", "and", "met", "smiled", "at"]
        one, two = word_level([*fillers, *NAMES[:7]]), word_level([*fillers, *NAMES[2:]])
        teacher, _ = tokenised(naming_task(), [one, two], 20, 0)
        used = {word for text in teacher.texts for word in text.split() if word in NAMES}
        assert used
        assert used <= set(NAMES[2:7])

    def test_too_few_common_words_is_an_error(self) -> None:
        fillers = ["Then", "and", "met", "smiled", "at"]
        one, two = word_level([*fillers, *NAMES[:5]]), word_level([*fillers, *NAMES[4:]])
        with pytest.raises(VocabularyError, match="too few usable words"):
            tokenised(naming_task(), [one, two], 20, 0)


class TestModels:
    def test_a_task_is_sampled_for_a_model(self) -> None:
        tokenizer = llama_like(words_of(naming_task()))
        model = load_model(random_gpt2(layers=1, vocabulary=len(tokenizer)))
        model.tokenizer = tokenizer
        prompts = naming_task().sample(model, n=5)
        pair = naming_task().sample_pair(model, model, n=5)
        expected = sample(naming_task(), tokenizer, n=5)
        assert prompts.source == naming_task()
        for each in (prompts, *pair):
            assert same_group(each.groups[0], expected.groups[0])

    def test_a_model_that_is_smaller_than_its_tokenizer_is_refused(self) -> None:
        tokenizer = llama_like(words_of(naming_task()))
        model = load_model(random_gpt2(layers=1, vocabulary=270))
        model.tokenizer = tokenizer
        with pytest.raises(VocabularyError, match="knows only 270 tokens"):
            naming_task().sample(model, n=5)

    def test_a_model_without_a_tokenizer_is_refused(self) -> None:
        with pytest.raises(ModelError, match="no tokenizer"):
            naming_task().sample(load_model(random_gpt2(layers=1)), n=5)
