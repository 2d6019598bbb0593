"""What is measured on each student of the zoo: the predictors, and the target.

Predictors come from the task itself, the target from its out-of-distribution variants, in which
one thing changes that training kept fixed. Only variants that the teacher itself solves better
than chance count: where it guesses, agreeing with it says nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.activations import Components, record_components
from circuitkd.circuits.engine import Replay
from circuitkd.circuits.influence import Influence, node_influence
from circuitkd.compare.recorded import compare_recorded
from circuitkd.compare.similarity import similarity
from circuitkd.metrics import accuracy, accuracy_interval, logit_difference
from circuitkd.models import reinitialised
from circuitkd.prompts import Prompts, compared_positions
from circuitkd.tasks import Task

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    n: int = 64
    n_shifted: int = 128
    seed: int = 0
    null_draws: int = 200
    random_students: int = 5


@dataclass(frozen=True)
class Answers:
    """A model's answers to prompts, in the order of their groups.

    ``choice``: the likeliest of the answer words, as a token id; ``metric``: the logit difference
    of correct and incorrect.
    """

    choice: Int[Tensor, "prompt"]
    metric: Float[Tensor, "prompt"]


@torch.no_grad()
def answers(model: TransformerBridge, prompts: Prompts) -> Answers:
    """What a model answers when only answer words are allowed.

    Answer words are all correct and incorrect answers of these prompts.
    """
    groups = prompts.groups
    words = torch.cat([torch.cat([group.correct, group.incorrect]) for group in groups]).unique()
    choices, metrics = [], []
    for group in groups:
        logits = model(group.clean)[:, -1]
        choices.append(words[logits[:, words].argmax(-1)])
        metrics.append(logit_difference(logits, group.correct, group.incorrect))
    return Answers(torch.cat(choices), torch.cat(metrics))


def agreement(teacher: Answers, student: Answers) -> float:
    """Share of prompts that get the same answer from both, right or wrong. In [0, 1]."""
    return float((teacher.choice == student.choice).double().mean())


def correlation(teacher: Answers, student: Answers) -> float:
    """Pearson correlation of the metric over prompts; NaN where one model's does not vary."""
    pair = torch.stack([teacher.metric, student.metric]).double().numpy()
    return float(np.corrcoef(pair)[0, 1]) if (pair.std(1) > 0).all() else float("nan")


def solved(answered: Answers) -> bool:
    """Whether the right answer beats the wrong one in more than half of the prompts, for sure:
    the 95 % Wilson interval of that share lies above 1/2.

    >>> undecided = torch.tensor([1.0, -1.0] * 20)
    >>> solved(Answers(torch.zeros(40, dtype=torch.int64), undecided))
    False
    """
    return accuracy_interval(answered.metric)[0] > 0.5


@torch.no_grad()
def final_residual(
    model: TransformerBridge, prompts: Prompts
) -> list[Float[Tensor, "batch pos d_model"]]:
    """The residual stream after the last block, before the final norm, group by group."""
    streams = []
    for group in prompts.groups:
        replay = Replay(model, group.clean)
        stream = replay.embed(group.clean)
        for layer in range(replay.n_layers):
            stream = replay.block(layer, stream)
        streams.append(stream)
    return streams


@dataclass(frozen=True)
class Bench:
    """One task, the teacher, and what is measured once for all students.

    All students share the teacher's tokenizer, so one sample of prompts serves everybody.
    """

    task: Task
    teacher: TransformerBridge
    settings: Settings
    floors: dict[int, list[tuple[Influence, Components]]] = field(default_factory=dict)

    @cached_property
    def prompts(self) -> Prompts:
        return self.task.sample(self.teacher, self.settings.n, self.settings.seed)

    @cached_property
    def shifted(self) -> Mapping[str, tuple[Prompts, Answers]]:
        """Variant -> its prompts and the teacher's answers, for the variants that it solves."""
        found = {}
        for variant, (prompts, given) in self._every_variant.items():
            if solved(given):
                found[variant] = (prompts, given)
        return found

    @cached_property
    def teacher_accuracies(self) -> Mapping[str, float]:
        """Variant -> share of prompts in which the teacher's right answer beats the wrong one."""
        return {name: accuracy(given.metric) for name, (_, given) in self._every_variant.items()}

    @cached_property
    def _every_variant(self) -> Mapping[str, tuple[Prompts, Answers]]:
        found = {}
        for variant in self.task.variants:
            prompts = self.task.sample(
                self.teacher, self.settings.n_shifted, self.settings.seed, variant=variant
            )
            found[variant] = (prompts, answers(self.teacher, prompts))
        return found

    def measure(self, student: TransformerBridge) -> Row:
        """One student's predictors and target."""
        return {
            **self._alignments(student),
            **self._plain(student),
            **self._agreement(student),
        }

    # ------------------------------------------------------------------ parts

    def _alignments(self, student: TransformerBridge) -> Row:
        measured = self._components(student)
        config = {
            "seed": self.settings.seed,
            "draws": 0,
            "null_draws": self.settings.null_draws,
            "random_students": self.settings.random_students,
            "preset": "default",
            "measure": "default",
            "positions": "all",
        }
        result = compare_recorded(
            {"teacher": self._teacher_components[0], "student": measured[0]},
            (self._teacher_components[1], measured[1]),
            config,
            random_students=self._floor(student),
        )
        transport, paper = result.alignment, result.paper_alignment
        student_side, teacher_side = (result.performance[side] for side in ("student", "teacher"))
        return {
            "transport": transport.value,
            "calibrated": transport.calibrated,
            "null_mean": None if transport.null is None else transport.null.mean,
            "null_z": None if transport.null is None else transport.null.z,
            "signed": result.alignments["signed transport"].value,
            "weighted_argmax": result.alignments["weighted argmax"].value,
            "paper": None if paper is None else paper.value,
            "delta_performance": teacher_side.mean - student_side.mean,
            "gain": student_side.mean - teacher_side.mean,
            "accuracy": student_side.accuracy,
        }

    def _plain(self, student: TransformerBridge) -> Row:
        sides = self._teacher_residual, final_residual(student, self.prompts)
        everywhere = [torch.cat([stream.flatten(0, 1) for stream in side]) for side in sides]
        at_end = [torch.cat([stream[:, -1] for stream in side]) for side in sides]
        return {
            "cka": similarity(everywhere[0], everywhere[1]),
            "cka_end": similarity(at_end[0], at_end[1]),
        }

    def _agreement(self, student: TransformerBridge) -> Row:
        by_variant, correlations, accuracies = {}, {}, {}
        for variant, (prompts, of_teacher) in self.shifted.items():
            given = answers(student, prompts)
            by_variant[variant] = agreement(of_teacher, given)
            correlations[variant] = correlation(of_teacher, given)
            accuracies[variant] = accuracy(given.metric)
        return {
            "agreement_in": agreement(self._teacher_answers, answers(student, self.prompts)),
            "agreement": float(np.mean(list(by_variant.values()))),
            "correlation": float(np.mean(list(correlations.values()))),
            "accuracy_out": float(np.mean(list(accuracies.values()))),
            "agreement_by_variant": by_variant,
            "correlation_by_variant": correlations,
            "accuracy_by_variant": accuracies,
        }

    # ------------------------------------------------------------------ measured once

    @cached_property
    def _teacher_components(self) -> tuple[Influence, Components]:
        return self._components(self.teacher)

    @cached_property
    def _teacher_residual(self) -> list[Tensor]:
        return final_residual(self.teacher, self.prompts)

    @cached_property
    def _teacher_answers(self) -> Answers:
        return answers(self.teacher, self.prompts)

    def _components(self, model: TransformerBridge) -> tuple[Influence, Components]:
        places = [compared_positions(group, group)[0] for group in self.prompts.groups]
        return (
            node_influence(model, self.prompts),
            record_components(model, self.prompts, places),
        )

    def _floor(self, student: TransformerBridge) -> list[tuple[Influence, Components]]:
        """Random students of the student's shape; in this zoo the depth is the shape."""
        depth = student.cfg.n_layers
        if depth not in self.floors:
            self.floors[depth] = [
                self._components(reinitialised(student, self.settings.seed + number))
                for number in range(self.settings.random_students)
            ]
        return self.floors[depth]
