"""A task file of one's own: what it may say, and what a wrong one is told."""

from pathlib import Path

import numpy as np
import pytest

from circuitkd.errors import TaskError
from circuitkd.tasks import load_task, tasks_directory

COLOURS = """\
name: colours
title: Colours
description: The second colour is said again.
source: this test
positions: [A, B]
words:
  colours: [red, blue, green, black]
slots:
  A: {from: colours}
  B: {from: colours}
answer: " {B}"
distractor: " {A}"
corruption:
  redraw: [A, B]
  avoid: same
templates:
  - "{A} and {B} make"
variants:
  loud:
    description: in capitals
    case: upper
"""


@pytest.fixture
def task_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "colours.yaml"
        path.write_text(text)
        return path

    return write


def test_the_example_of_the_format_is_a_task(task_file):
    text = (tasks_directory() / "README.md").read_text(encoding="utf-8")
    task = load_task(task_file(text.split("```yaml\n")[1].split("```")[0]))
    prompt = task.draw(np.random.default_rng(0), variant="unseen_names")
    assert prompt.correct == " " + prompt.clean.word("OWNER")


def changed(old: str, new: str) -> str:
    assert COLOURS.count(old) == 1, "the change must hit one place"
    return COLOURS.replace(old, new)


def test_a_file_of_ones_own_makes_prompts(task_file):
    task = load_task(task_file(COLOURS))
    prompt = task.draw(np.random.default_rng(0), variant="loud")
    assert prompt.clean.text == f"{prompt.slots['A']} AND {prompt.slots['B']} MAKE"
    assert prompt.correct == f" {prompt.slots['B']}"
    assert prompt.correct.isupper()


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "allowed"),
    [
        ("title: Colours\n", "", 1, "title", "missing"),
        ("title:", "tittle:", 2, "tittle", "did you mean title?"),
        ("source: this test", "source: ''", 4, "source", "at least 1 character"),
        ("name: colours", "name: My colours", 1, "name", "match pattern"),
        ("[A, B]\nwords", "[A, END]\nwords", 5, "positions[1]", "without END"),
        ("black]", "red]", 7, "words.colours[3]", "listed twice"),
        ("black]", '" black"]', 7, "words.colours[3]", "without spaces around it"),
        ("A: {from: colours}", "A: {from: colors}", 9, "slots.A.from", "allowed: colours"),
        ("A: {from: colours}", "A: {of: colours}", 9, "slots.A.of", "allowed: from, run"),
        ("A: {from: colours}", "A: {run: 0}", 9, "slots.A.from", "missing"),
        ("A: {from: colours}", "A: {from: colours, run: x}", 9, "slots.A.run", "integer"),
        (
            "A: {from: colours}",
            "A: {from: colours, run: 0, after: B}",
            9,
            "slots.A",
            "at most one of run, after, upto",
        ),
        ('answer: " {B}"', 'answer: " {C}"', 11, "answer", "allowed: A or B"),
        ('answer: " {B}"', 'answer: " {A}"', 12, "distractor", "another text"),
        ("avoid: same", "avoid: some", 15, "corruption.avoid", "'all', 'same' or 'none'"),
        ("redraw: [A, B]", "redraw: [A, C]", 14, "corruption.redraw", "allowed: A or B"),
        ("{A} and {B} make", "{A} and {C} make", 17, "templates[0]", "allowed: A or B"),
        ("{A} and {B make", "{A} and {B make", 17, "templates[0]", "{slot:label}"),
        ("{A} and {B} make", "{A} and {B} make ", 17, "templates[0]", "up to the answer"),
        ("{A} and {B} make", "{A} and make", 17, "templates[0]", "A, B"),
        ("case: upper", "case: louder", 21, "variants.loud.case", "'lower' or 'upper'"),
        ("case: upper", "sound: upper", 21, "variants.loud.sound", "description, words"),
        ("case: upper", "replace: {maek: make}", 21, "variants.loud.replace", "each template"),
        ("    case: upper\n", "", 19, "variants.loud", "allowed: words, templates, prefix"),
        ("case: upper", "words: {greys: [x, y]}", 21, "variants.loud.words.greys", "colours"),
        (
            "case: upper",
            'templates: ["{A} or"]',
            21,
            "variants.loud.templates[0]",
            "once in each template",
        ),
    ],
)
def test_a_wrong_file_is_told_line_field_and_what_is_allowed(
    task_file, old: str, new: str, line: int, field: str, allowed: str
):
    text = changed("{A} and {B} make" if old == new else old, new)
    path = task_file(text)
    with pytest.raises(TaskError) as caught:
        load_task(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}, field {field}")
    assert allowed in message


def test_a_template_must_hold_the_answer_slot(task_file):
    text = changed("positions: [A, B]", "positions: [A]").replace("{A} and {B} make", "{A} makes")
    text = text.replace("redraw: [A, B]", "redraw: [A]")
    with pytest.raises(TaskError, match=r"line 17, .*lacks the answer slot \{B\}; allowed"):
        load_task(task_file(text))


def test_an_answer_may_follow_from_the_run_that_the_template_shows(task_file):
    text = (
        COLOURS.replace("A: {from: colours}", "A: {from: colours, run: 0}")
        .replace("B: {from: colours}", "B: {from: colours, run: 1}\n  C: {from: colours, run: 2}")
        .replace('" {B}"', '" {C}"')
    )
    prompt = load_task(task_file(text)).draw(np.random.default_rng(0))
    assert f"{prompt.clean.text}{prompt.correct}" in (
        "red and blue make green",
        "blue and green make black",
    )


def test_a_template_may_have_its_own_answer_and_its_own_corruption(task_file):
    text = """\
name: agreement
title: Agreement
description: The verb follows the number of the subject.
source: this test
positions: [SUBJECT]
words:
  one: [key, door]
  many: [keys, doors]
slots:
  one: {from: one}
  many: {from: many}
answer: " is"
distractor: " are"
corruption:
  redraw: {SUBJECT: many}
templates:
  - "The {one:SUBJECT} near the {many}"
  - text: "The {many:SUBJECT} near the {one}"
    answer: " are"
    distractor: " is"
    redraw: {SUBJECT: one}
"""
    task = load_task(task_file(text))
    rng = np.random.default_rng(0)
    for template, (verb, corrupted) in enumerate([(" is", "s"), (" are", "")]):
        prompt = task.draw(rng, template=template)
        assert prompt.correct == verb
        assert prompt.corrupted.word("SUBJECT").removesuffix("s") + corrupted == (
            prompt.corrupted.word("SUBJECT")
        )


def test_words_that_yaml_would_change_stay_words(task_file):
    words = "[no, on, 01, 1e3]"
    task = load_task(task_file(changed("[red, blue, green, black]", words)))
    assert task.words()["colours"] == ("no", "on", "01", "1e3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "line 1.*not YAML"),
        ("- a\n- b\n", "line 1.*mapping"),
        ("", "line 1.*mapping"),
        (COLOURS + "name: again\n", "line 22, field name.*twice"),
        ("name: !!python/object/apply:os.getcwd []\n", "field name"),
        ("name: &a {x: *a}\n", "not YAML|field name"),
        ("description: {x: 1, x: 2}\n", r"line 1, field description\.x.*twice"),
    ],
)
def test_what_is_no_task_file_is_refused(task_file, text: str, message: str):
    with pytest.raises(TaskError, match=message):
        load_task(task_file(text))


def test_aliases_of_aliases_are_looked_at_once(task_file):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(TaskError, match="no such field"):
        load_task(task_file("\n".join(lines)))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "task.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        load_task(path)


def test_an_unknown_task_is_told_the_known_ones_and_the_closest():
    with pytest.raises(TaskError, match=r"Did you mean 'numerals'\?.*ioi.*weekdays"):
        load_task("numeral")


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(TaskError, match="no task file"):
        load_task(tmp_path / "none.yaml")


def test_a_directory_is_no_task_file(tmp_path: Path):
    with pytest.raises(TaskError, match="no task file"):
        load_task(tmp_path)
