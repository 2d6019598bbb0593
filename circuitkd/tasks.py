"""Tasks: what a model is asked, as data.

A task file (``tasks/*.yaml``) says everything: word lists, slots, templates, answer, distractor,
how the corrupted prompt is made, labelled positions, and out-of-distribution variants. This
module reads and checks such a file and draws prompts from it, as text. What a tokenizer makes of
the text is the business of ``circuitkd.prompts``.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import model_validator

from circuitkd._task_checks import check_task
from circuitkd._task_draw import (
    Sentence,
    TextPrompt,
    Usable,
    draw_corruption,
    draw_prompt,
)
from circuitkd._task_file import read_task_file
from circuitkd._task_schema import TaskSpec, resolve, say
from circuitkd.errors import TaskError

if TYPE_CHECKING:
    from circuitkd.prompts import Prompts

__all__ = ["Sentence", "Task", "TextPrompt", "load_task", "task_names", "tasks_directory"]


class Task(TaskSpec):
    """A task: the content of its file, and drawing from it.

    Drawing depends on nothing but the task, the arguments and the generator, so the same seed
    gives the same prompts on every machine.

    >>> task = load_task("ioi")
    >>> task.labels
    ('IO', 'S1', 'S2', 'END')
    >>> prompt = task.draw(np.random.default_rng(0))
    >>> prompt.correct == " " + prompt.clean.word("IO")
    True
    """

    @model_validator(mode="after")
    def _check(self) -> "Task":
        check_task(self)
        return self

    def with_variant(self, variant: str | None) -> "Task":
        """The task with a variant's changes made; the task itself for None.

        Raises ``TaskError`` for a variant that the task does not have.
        """
        if variant is None:
            return self
        if variant not in self.variants:
            known = say(self.variants) if self.variants else "none"
            raise TaskError(f"Task {self.name} has no variant {variant!r}. Its variants: {known}.")
        return self.model_copy(update=resolve(self, self.variants[variant]))

    def words(self, variant: str | None = None) -> Mapping[str, tuple[str, ...]]:
        """Word list -> its words, in order."""
        lists = self.with_variant(variant).word_lists
        return {name: words.words for name, words in lists.items()}

    def draw(
        self,
        rng: np.random.Generator,
        *,
        variant: str | None = None,
        template: int | None = None,
        usable: Usable | None = None,
    ) -> TextPrompt:
        """Draw one prompt.

        Args:
            rng: where the randomness comes from.
            variant: an out-of-distribution variant; None for the task itself.
            template: index of the template; None draws one.
            usable: word list -> the words that may be used; lists it does not name are free.
                A run of consecutive words is drawn among those all of whose members are usable.

        Raises:
            TaskError: no such variant or template, or too few usable words.
        """
        prompt = draw_prompt(self.with_variant(variant), rng, template, usable)
        return replace(prompt, variant=variant)

    def recorrupt(
        self, prompt: TextPrompt, rng: np.random.Generator, *, usable: Usable | None = None
    ) -> TextPrompt:
        """The same clean prompt with a freshly drawn corruption."""
        return draw_corruption(self.with_variant(prompt.variant), prompt, rng, usable)

    def sample(
        self,
        model: Any,
        n: int = 100,
        seed: int = 0,
        *,
        variant: str | None = None,
        bos: str = "auto",
    ) -> "Prompts":
        """``n`` prompts, tokenised for ``model``; see ``circuitkd.prompts``."""
        from circuitkd import prompts

        return prompts.sample(self, model, n, seed, variant=variant, bos=bos)

    def sample_pair(
        self,
        teacher: Any,
        student: Any,
        n: int = 100,
        seed: int = 0,
        *,
        variant: str | None = None,
        bos: str = "auto",
    ) -> "tuple[Prompts, Prompts]":
        """The same ``n`` prompts, tokenised for each of two models."""
        from circuitkd import prompts

        return prompts.sample_pair(self, teacher, student, n, seed, variant=variant, bos=bos)


def tasks_directory() -> Path:
    """The folder of the shipped task files: inside an installed wheel, or in a checkout."""
    package = Path(__file__).resolve().parent
    packed = package / "tasks_data"
    return packed if packed.is_dir() else package.parent / "tasks"


def task_names() -> tuple[str, ...]:
    """Names of the shipped tasks.

    >>> "ioi" in task_names()
    True
    """
    return tuple(sorted(path.stem for path in tasks_directory().glob("*.yaml")))


def load_task(name_or_path: str | PathLike[str]) -> Task:
    """A shipped task by name, or a task file by path.

    Raises:
        TaskError: unknown task; or a wrong file, with its line, field and what is allowed there.
    """
    path = Path(name_or_path)
    text = str(name_or_path)
    if text in task_names():
        return read_task_file(tasks_directory() / f"{text}.yaml", Task)
    if path.is_file():
        return read_task_file(path, Task)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise TaskError(f"There is no task file {text}.")
    close = difflib.get_close_matches(text, task_names(), n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise TaskError(
        f"There is no task {text!r}.{hint} Shipped tasks: {', '.join(task_names())}; "
        "or give the path of a task file (.yaml)."
    )
