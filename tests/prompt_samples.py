"""Samples of prompts that several tests look at, and how to read them back."""

import re
from collections.abc import Sequence
from functools import cache

import torch
from tokenizers_for_tests import byte_level, llama_like, word_level, word_piece, words_of
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from circuitkd.prompts import PromptGroup, Prompts, tokenised
from circuitkd.tasks import Task, load_task, task_names


def _shortened(task: Task) -> Task:
    """The task with two of its templates: each costs a group's means."""
    return task.model_copy(update={"templates": task.templates[:2]})


SHIPPED = {name: _shortened(load_task(name)) for name in task_names()}
WORDS = words_of(*map(load_task, task_names()))
KINDS: dict[str, PreTrainedTokenizerFast] = {
    "byte_level": byte_level(WORDS),
    "llama_like": llama_like(WORDS),
    "word_level": word_level(WORDS),
    "word_piece": word_piece(WORDS),
}
NAMES = ["Mary", "John", "Tom", "Anna", "Paul", "Kate", "Jane", "Adam", "Lucy"]
POSABLE = [
    *((task, "byte_level") for task in task_names()),
    *((task, "llama_like") for task in task_names() if task != "greater_than"),  # single digits
    *((task, kind) for task in ("ioi", "greater_than") for kind in ("word_level", "word_piece")),
]


@cache
def shipped_pair(task: str) -> tuple[Prompts, ...]:
    return tokenised(SHIPPED[task], [KINDS["byte_level"], KINDS["llama_like"]], 15)


@cache
def shipped(task: str, kind: str) -> Prompts:
    return sample(SHIPPED[task], KINDS[kind], n=15)


def sample(
    task: Task, tokenizer: PreTrainedTokenizerBase, n: int = 20, seed: int = 0, bos: str = "auto"
) -> Prompts:
    (prompts,) = tokenised(task, [tokenizer], n, seed, bos=bos)
    return prompts


def naming_task(names: Sequence[str] = NAMES, **changes: object) -> Task:
    """Who is smiled at? A task as small as they come."""
    fields: dict[str, object] = {
        "name": "naming",
        "title": "Naming",
        "description": "Two meet; one smiles at the other.",
        "source": "made for this test",
        "positions": ["IO", "S1", "S2"],
        "words": {"names": list(names)},
        "slots": {"IO": {"from": "names"}, "S": {"from": "names"}},
        "answer": " {IO}",
        "distractor": " {S}",
        "corruption": {"redraw": ["IO", "S1", "S2"], "distinct": True, "avoid": "all"},
        "templates": ["Then {IO} and {S:S1} met, and {S:S2} smiled at"],
    }
    return Task.model_validate({**fields, **changes})


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def bare(text: str) -> str:
    """Without what some tokenizers do not keep: case and space."""
    return re.sub(r"\s", "", text).lower()


def labelled_words(task: Task, template: int, text: str) -> dict[str, str]:
    """The words at the labels, read off the text with the template."""
    groups: list[str] = []

    def any_word(match: re.Match[str]) -> str:
        words = task.word_lists[task.slots[match[1]].source].words
        words = (*words, *task.corruption.set.values())
        groups.append(task.label_of(match[1], match[2]) or "")
        return f"({'|'.join(sorted(map(re.escape, words), key=len, reverse=True))})"

    pattern = re.sub(r"\\{(\w+)(?::(\w+))?\\}", any_word, re.escape(task.templates[template].text))
    found = re.fullmatch(pattern, text)
    assert found is not None
    return {label: word for label, word in zip(groups, found.groups(), strict=True) if label}


def same_group(one: PromptGroup, other: PromptGroup) -> bool:
    names = ("clean", "corrupted", "correct", "incorrect", "index", "means")
    return one.texts == other.texts and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in names
    )


def candidates_of(group: PromptGroup) -> list[int]:
    assert group.candidates is not None
    return group.candidates.tolist()
