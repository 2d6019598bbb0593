"""A zoo of students of the bundled teacher, each made by a recipe in seconds to half a minute.

A student keeps some of the teacher's layers (with its embeddings and final norm) or begins with
random weights; is trained for some steps on the teacher's logits or on the text itself; and may be
damaged by noise afterwards. Corpus, losses and training loop are those that made the bundled pair
(``scripts/``); only the documents of the measured tasks are used.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from circuitkd.models import BUNDLED_DIRECTORY
from circuitkd.tasks import Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
from bundled_corpus import Corpus
from train_bundled import Schedule, new_model, save, student_of, train

BATCH, WARMUP = 32, 10
FEW, MORE = 30, 200

BUNDLED_STUDENT = "tiny-student"


@dataclass(frozen=True)
class Recipe:
    """How to make one student.

    Attributes:
        layers: the teacher's layers that it begins as; for ``start="random"`` only their number
            counts.
        start: ``teacher`` (kept layers), ``random`` (weights), or ``bundled`` (``tiny-student``).
        loss: ``logits`` (divergence from the teacher) or ``labels`` (the text itself).
        steps: training steps of 32 documents.
        seed: of the documents, the random weights and the noise.
        noise: standard deviation of the noise added to every weight tensor after training, in
            units of that tensor's own standard deviation.
    """

    layers: tuple[int, ...]
    start: str = "teacher"
    loss: str = "logits"
    steps: int = 0
    seed: int = 0
    noise: float = 0.0

    @property
    def name(self) -> str:
        """A folder's name that tells recipes apart."""
        kept = "".join(map(str, self.layers))
        begin = {"teacher": f"keep{kept}", "random": f"random{len(self.layers)}"}
        parts = [begin.get(self.start, self.start)]
        parts += [f"{self.loss}{self.steps}"] if self.steps else []
        parts += [f"seed{self.seed}"] if self.seed else []
        parts += [f"noise{self.noise:g}"] if self.noise else []
        return "-".join(parts)


def zoo(few: int = FEW, more: int = MORE) -> tuple[Recipe, ...]:
    """The recipes, in an order in which every beginning is a mixture.

    >>> len(zoo()) == len({recipe.name for recipe in zoo()}) >= 24
    True
    """
    bundled = Recipe((0, 2), start="bundled")
    depths = ((0,), (0, 2), (0, 1, 2))
    families = (
        [bundled, *(replace(bundled, noise=sigma) for sigma in (0.1, 0.2, 0.4, 0.8))],
        _kept([(0, 2), (0, 1, 2), (0, 3), (0,), (0, 1), (2, 3), (0, 1, 3), (0, 2, 3)], steps=more),
        _kept([(0, 2), (0, 1, 2), (0, 1), (0, 3), (0,)], steps=more, loss="labels"),
        _kept([*depths, (0, 3)], steps=few),
        _kept([(0, 2), (0, 1, 2)], steps=few, loss="labels"),
        [Recipe(layers, steps=more, seed=seed) for layers in depths[1:] for seed in (1, 2)],
        [Recipe(layers, start="random", steps=more) for layers in depths],
        _kept(depths),
        [Recipe((0, 1, 2), steps=more, noise=sigma) for sigma in (0.1, 0.3)],
        [Recipe(layers, start="random", seed=100) for layers in depths],
    )
    return _interleaved(families)


def toy_zoo() -> tuple[Recipe, ...]:
    """A few students that take no time, for trying the machinery."""
    bundled = Recipe((0, 2), start="bundled")
    return (
        bundled,
        replace(bundled, noise=0.2),
        replace(bundled, noise=0.8),
        Recipe((0, 2), steps=2),
        Recipe((0,), steps=2, loss="labels"),
        Recipe((0, 1, 2)),
        Recipe((0,), start="random", seed=100),
    )


def _kept(kept: Iterable[tuple[int, ...]], steps: int = 0, loss: str = "logits") -> list[Recipe]:
    return [Recipe(layers, steps=steps, loss=loss) for layers in kept]


def _interleaved(families: Sequence[Sequence[Recipe]]) -> tuple[Recipe, ...]:
    longest = max(map(len, families))
    return tuple(one[place] for place in range(longest) for one in families if place < len(one))


# --- making them -------------------------------------------------------------------------------


def read_network(folder: Path) -> GPT2LMHeadModel:
    """A model as transformers reads it, to be trained or copied from."""
    return GPT2LMHeadModel.from_pretrained(folder, local_files_only=True).eval()


def make_student(
    recipe: Recipe,
    teacher: GPT2LMHeadModel,
    tasks: Mapping[str, Task],
    tokenizer: PreTrainedTokenizerFast,
) -> GPT2LMHeadModel:
    """Begin, train and damage one student."""
    torch.manual_seed(recipe.seed)
    if recipe.start == "bundled":
        student = read_network(BUNDLED_DIRECTORY / BUNDLED_STUDENT)
    elif recipe.start == "random":
        student = new_model(teacher.config.vocab_size, len(recipe.layers))
    else:
        student = student_of(teacher, recipe.layers)
    if recipe.steps:
        schedule = Schedule(recipe.steps, batch=BATCH, warmup=WARMUP)
        goal = teacher if recipe.loss == "logits" else None
        # What is printed here is the table; the training loop reports elsewhere.
        with contextlib.redirect_stdout(sys.stderr):
            train(student, Corpus(tasks, tokenizer, recipe.seed), schedule, goal)
    add_noise(student, recipe.noise, recipe.seed)
    return student.eval()


@torch.no_grad()
def add_noise(model: GPT2LMHeadModel, noise: float, seed: int) -> None:
    """Gaussian noise on every weight matrix, in place, of ``noise`` times its own deviation.

    Biases and norms stay as they are: their deviation says nothing about their scale.
    """
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():  # a tied embedding comes once
        if noise and weight.ndim == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=draw)


def ensure_student(recipe: Recipe, folder: Path, tasks: Mapping[str, Task]) -> Path:
    """The student's directory under ``folder``; made unless a finished one of this recipe is there.

    It appears under its name only when it is complete.
    """
    place, about = folder / recipe.name, _about(recipe, tasks)
    if is_made(recipe, folder, tasks):
        return place
    home = BUNDLED_DIRECTORY / "tiny-teacher"
    tokenizer = AutoTokenizer.from_pretrained(home, local_files_only=True)
    student = make_student(recipe, read_network(home), tasks, tokenizer)
    unfinished = folder / f".{recipe.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    save(student, tokenizer, unfinished)
    (unfinished / "recipe.json").write_text(json.dumps(about, indent=2) + "\n")
    shutil.rmtree(place, ignore_errors=True)
    unfinished.rename(place)
    return place


def is_made(recipe: Recipe, folder: Path, tasks: Mapping[str, Task]) -> bool:
    """Whether ``folder`` holds this recipe's student, trained on these tasks."""
    file = folder / recipe.name / "recipe.json"
    return file.is_file() and json.loads(file.read_text()) == _about(recipe, tasks)


def _about(recipe: Recipe, tasks: Mapping[str, Task]) -> dict[str, object]:
    return {**asdict(recipe), "layers": list(recipe.layers), "batch": BATCH, "tasks": sorted(tasks)}
