"""Tasks as data: what the shipped files say, how prompts are drawn, what a wrong file is told."""

import re
from itertools import pairwise

import numpy as np
import pytest

from circuitkd.errors import TaskError
from circuitkd.tasks import Task, TextPrompt, load_task, task_names, tasks_directory

SEQUENCES = ("numerals", "number_words", "months", "weekdays")
SHIPPED = ("greater_than", "ioi", *SEQUENCES)

TASKS = {name: load_task(name) for name in SHIPPED}
EVERY_VARIANT = [(name, variant) for name in SHIPPED for variant in (None, *TASKS[name].variants)]


def draws(task: Task, n: int = 30, **kwargs) -> list[TextPrompt]:
    rng = np.random.default_rng(0)
    return [task.draw(rng, **kwargs) for _ in range(n)]


# --- the shipped tasks -----------------------------------------------------------------------


def test_the_shipped_tasks_are_found_by_name():
    assert set(SHIPPED) <= set(task_names())


@pytest.mark.parametrize("name", task_names())
def test_a_task_is_called_like_its_file(name: str):
    assert load_task(name).name == name


def test_a_path_works_like_a_name():
    assert load_task(tasks_directory() / "ioi.yaml") == load_task("ioi")
    assert load_task(str(tasks_directory() / "ioi.yaml")) == load_task("ioi")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_variants_every_task_has(name: str):
    wanted = {"unseen_words", "unseen_templates", "longer_prefix", "typos", "other_casing"}
    assert wanted <= set(TASKS[name].variants)


@pytest.mark.parametrize(("name", "variant"), EVERY_VARIANT)
def test_clean_and_corrupted_differ_at_labelled_words_only(name: str, variant: str | None):
    for prompt in draws(TASKS[name], n=6, variant=variant):
        assert prompt.clean.text != prompt.corrupted.text
        assert _without_words(prompt.clean) == _without_words(prompt.corrupted)


def _without_words(sentence) -> str:
    text = sentence.text
    for start, end in sorted(sentence.spans.values(), reverse=True):
        text = text[:start] + "_" + text[end:]
    return text


@pytest.mark.parametrize(("name", "variant"), EVERY_VARIANT)
def test_spans_mark_the_words_of_their_slots(name: str, variant: str | None):
    task = TASKS[name]
    words = {word for words in task.words(variant).values() for word in words}
    fixed = set(task.with_variant(variant).corruption.set.values())
    for prompt in draws(task, n=6, variant=variant):
        for label in task.positions:
            assert prompt.clean.word(label) in words
            assert prompt.corrupted.word(label) in words | fixed


@pytest.mark.parametrize(("name", "variant"), EVERY_VARIANT)
def test_texts_are_clean_text(name: str, variant: str | None):
    for prompt in draws(TASKS[name], n=6, variant=variant):
        for text in (prompt.clean.text, prompt.corrupted.text):
            assert text == text.strip()
            assert "  " not in text
            assert not set("{}") & set(text)
        assert prompt.correct != prompt.incorrect


@pytest.mark.parametrize("name", SHIPPED)
def test_the_same_seed_gives_the_same_prompts(name: str):
    task = TASKS[name]
    assert draws(task, n=10) == draws(task, n=10)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_prompt_can_be_drawn_from_each_template(name: str):
    task = TASKS[name]
    for index in range(len(task.templates)):
        assert draws(task, n=1, template=index)[0].template == index


def test_ioi_answers_with_the_name_that_occurs_once():
    for prompt in draws(TASKS["ioi"]):
        io, s1, s2 = (prompt.clean.word(label) for label in ("IO", "S1", "S2"))
        assert s1 == s2 != io
        assert (prompt.correct, prompt.incorrect) == (f" {io}", f" {s1}")


def test_ioi_is_corrupted_by_three_other_names():
    for prompt in draws(TASKS["ioi"]):
        old = {prompt.clean.word(label) for label in ("IO", "S1", "S2")}
        new = {prompt.corrupted.word(label) for label in ("IO", "S1", "S2")}
        assert len(new) == 3
        assert not new & old


def test_ioi_names_the_indirect_object_first_as_often_as_second():
    orders = [
        template.text.index("{IO}") < template.text.index("{S:S1}")
        for template in TASKS["ioi"].templates
    ]
    assert len(orders) >= 8
    assert sum(orders) * 2 == len(orders)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_step_by_one_and_want_the_next(name: str):
    task = TASKS[name]
    for variant in (None, *task.variants):
        words = next(words for key, words in task.words(variant).items() if key != "nouns")
        for prompt in draws(task, n=6, variant=variant):
            run = [prompt.clean.word(f"N{i}") for i in range(1, 5)]
            assert prompt.incorrect == f" {run[-1]}"
            places = [words.index(word) for word in (*run, prompt.correct.strip())]
            assert all((b - a) % len(words) == 1 for a, b in pairwise(places))


@pytest.mark.parametrize("name", ["numerals", "number_words", "months"])
def test_sequences_do_not_wrap_around(name: str):
    task = TASKS[name]
    words = next(words for key, words in task.words().items() if key != "nouns")
    for prompt in draws(task, n=200):
        assert words.index(prompt.correct.strip()) > words.index(prompt.incorrect.strip())


def test_weeks_wrap_around():
    assert any(prompt.clean.word("N4") == "Sunday" for prompt in draws(TASKS["weekdays"]))


@pytest.mark.parametrize("name", SEQUENCES)
def test_corrupted_sequences_do_not_step_by_one_at_the_end(name: str):
    task = TASKS[name]
    words = task.with_variant(None).word_lists[task.slots["N1"].source]
    for prompt in draws(task, n=100):
        new = [prompt.corrupted.word(f"N{i}") for i in range(1, 5)]
        assert len(set(new)) == 4
        assert words.successor(new[2]) != new[3]
        assert all(prompt.clean.word(f"N{i}") != new[i - 1] for i in range(1, 5))


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_nouns_of_a_prompt_differ(name: str):
    for prompt in draws(TASKS[name]):
        assert len({prompt.slots[slot] for slot in "ABCDE"}) == 5


def test_greater_than_splits_all_endings_at_the_start_year():
    task = TASKS["greater_than"]
    endings = task.words()["endings"]
    for prompt in draws(task):
        start = int(prompt.clean.word("YY"))
        assert {int(word) for word in prompt.valid} == set(range(start + 1, 100))
        assert {*prompt.valid, *prompt.invalid} == set(endings)
        assert prompt.correct in prompt.valid
        assert prompt.incorrect in prompt.invalid


def test_greater_than_is_corrupted_to_a_year_ending_in_01():
    for prompt in draws(TASKS["greater_than"]):
        century, years = prompt.clean.word("XX1"), prompt.clean.word("YY")
        assert prompt.corrupted.text == prompt.clean.text.replace(century + years, century + "01")


# --- variants --------------------------------------------------------------------------------


def test_unseen_words_are_unseen():
    for name in SHIPPED:
        task = TASKS[name]
        for variant in ("unseen_words", "unseen_names", "unseen_range"):
            if variant in task.variants:
                changed = task.variants[variant].words
                assert all(
                    not set(words.words) & set(task.words()[key]) for key, words in changed.items()
                )


@pytest.mark.parametrize("name", SEQUENCES)
def test_unseen_starts_are_unseen(name: str):
    task = TASKS[name]
    seen = {prompt.clean.word("N1") for prompt in draws(task, n=100)}
    unseen = {prompt.clean.word("N1") for prompt in draws(task, variant="unseen_starts")}
    assert unseen
    assert not seen & unseen


@pytest.mark.parametrize("name", SHIPPED)
def test_unseen_templates_are_unseen(name: str):
    task = TASKS[name]
    other = task.with_variant("unseen_templates")
    assert not {t.text for t in task.templates} & {t.text for t in other.templates}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_longer_prefix_comes_before_an_unchanged_template(name: str):
    task = TASKS[name]
    for before, after in zip(
        task.templates, task.with_variant("longer_prefix").templates, strict=True
    ):
        assert after.text.endswith(before.text)
        assert len(after.text) > len(before.text)


@pytest.mark.parametrize("name", SHIPPED)
def test_typos_touch_no_slot_word(name: str):
    task = TASKS[name]
    assert task.words("typos") == task.words()
    for before, after in zip(task.templates, task.with_variant("typos").templates, strict=True):
        assert before.text != after.text
        assert re.findall(r"\{.*?\}", before.text) == re.findall(r"\{.*?\}", after.text)


@pytest.mark.parametrize("name", SHIPPED)
def test_other_casing_changes_texts_and_answers_alike(name: str):
    for prompt in draws(TASKS[name], n=10, variant="other_casing"):
        for text in (prompt.clean.text, prompt.corrupted.text, prompt.correct, prompt.incorrect):
            assert text == text.lower()


def test_an_unknown_variant_is_told_the_known_ones():
    with pytest.raises(TaskError, match="unseen_names"):
        TASKS["ioi"].draw(np.random.default_rng(0), variant="martian")


# --- restricting the words -------------------------------------------------------------------


def test_only_usable_words_are_drawn():
    usable = {"names": ["Mary", "John", "Tom", "James", "Anna"]}
    for prompt in draws(TASKS["ioi"], usable=usable):
        for sentence in (prompt.clean, prompt.corrupted):
            assert {sentence.word(label) for label in ("IO", "S1", "S2")} <= set(usable["names"])


def test_runs_avoid_unusable_members():
    usable = {"numbers": [str(i) for i in range(1, 21) if i != 7]}
    for prompt in draws(TASKS["numerals"], usable=usable):
        assert "7" not in prompt.clean.text.split()
        assert prompt.correct != " 7"
        assert "7" not in [prompt.corrupted.word(f"N{i}") for i in range(1, 5)]


def test_usable_endings_limit_both_sides_of_greater_than():
    usable = {"endings": ["05", "40", "41", "90"], "starts": ["10", "40", "89"]}
    for prompt in draws(TASKS["greater_than"], usable=usable):
        assert {*prompt.valid, *prompt.invalid} == set(usable["endings"])
        assert prompt.correct in prompt.valid


def test_too_few_usable_words_name_the_list():
    with pytest.raises(TaskError, match="names"):
        TASKS["ioi"].draw(np.random.default_rng(0), usable={"names": ["Mary"]})
    with pytest.raises(TaskError, match="numbers"):
        TASKS["numerals"].draw(np.random.default_rng(0), usable={"numbers": ["1", "3", "5"]})


def test_too_few_words_for_the_corruption_are_an_error():
    usable = {"names": ["Mary", "John", "Tom", "James"]}
    with pytest.raises(TaskError, match="corrupted"):
        TASKS["ioi"].draw(np.random.default_rng(0), usable=usable)


def test_recorrupting_keeps_the_clean_side():
    rng = np.random.default_rng(0)
    for variant in (None, "unseen_names"):
        task = TASKS["ioi"]
        prompt = task.draw(rng, variant=variant)
        others = [task.recorrupt(prompt, rng) for _ in range(20)]
        assert {other.clean.text for other in others} == {prompt.clean.text}
        assert len({other.corrupted.text for other in others}) > 1
        names = set(task.words(variant)["names"])
        assert all(other.corrupted.word("S1") in names for other in others)
