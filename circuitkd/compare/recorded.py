"""From measurements to a ``Comparison``: similarities, alignments, and their evidence."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from circuitkd.circuits.activations import Components
from circuitkd.circuits.influence_result import Influence, shares
from circuitkd.compare._robustness_result import robustness_of
from circuitkd.compare._warnings import NO_PAPER, competence_warnings, sample_warnings
from circuitkd.compare.alignment import (
    Alignment,
    argmax_score,
    bootstrap_scores,
    signed_transport_score,
    transport_alignment,
    transport_score,
    with_interval,
)
from circuitkd.compare.evidence import (
    Score,
    chance_similarity,
    random_floor,
    shuffled_null,
    split_half_ceiling,
)
from circuitkd.compare.result import Comparison
from circuitkd.compare.similarity import (
    ComponentSimilarity,
    component_similarity,
    paper_similarity,
    resampled_similarity,
    same_kind,
)
from circuitkd.metrics import bootstrap_weights, percentile_interval
from circuitkd.runs import versions

Progress = Callable[[str, int, int], None]
RandomStudent = tuple[Influence, Components]


def compare_recorded(
    influences: Mapping[str, Influence],
    components: tuple[Components, Components],
    config: Mapping[str, Any],
    warnings: Sequence[str] = (),
    *,
    parameters: Mapping[str, int] | None = None,
    random_students: Iterable[RandomStudent] = (),
    progress: Progress | None = None,
) -> Comparison:
    """The comparison of two models whose influences and components have been measured.

    ``config`` needs ``seed``, ``draws``, ``null_draws``, ``measure``, ``preset`` and ``positions``
    (``all`` or ``labelled``); the rest of it is kept as it is. ``parameters``: how many each model
    has, for the slopes of the brittleness. ``random_students`` are influences and components of
    randomly initialised students on the same prompts, the floor; they are asked for one by one, so
    that only one need be there at a time.
    """
    effects = tuple(influences[side].effects.double().numpy() for side in ("teacher", "student"))
    weights = _weights(len(effects[0]), config["draws"], config["seed"])
    measure = config["measure"]
    similarity = resampled_similarity(*components, weights, measure, progress)
    p, q = (shares(effect.mean(0)) for effect in effects)
    _, plan = transport_alignment(p, q, similarity.value)
    random = tuple(_random(components[0], *student, measure) for student in random_students)
    evidence = _Evidence(effects, components, weights, config, random, progress)
    alignments = dict(evidence.alignments(similarity))
    paper = evidence.paper_table
    rows, columns = ([n.name for n in influences[side].nodes] for side in ("teacher", "student"))
    ends = percentile_interval(similarity.draws) if len(similarity.draws) else (None, None)
    low, high = (
        None if end is None else pd.DataFrame(end, index=rows, columns=columns) for end in ends
    )
    return Comparison(
        alignments=alignments,
        influences=dict(influences),
        similarity=pd.DataFrame(similarity.value, index=rows, columns=columns),
        similarity_low=low,
        similarity_high=high,
        paper_similarity=None
        if paper is None
        else pd.DataFrame(paper, index=rows, columns=columns),
        plan=pd.DataFrame(plan, index=rows, columns=columns),
        chance_similarity=chance_similarity(
            effects[0].mean(0), [(student.effect, student.similarity) for student in random]
        ),
        robustness=robustness_of(influences, parameters),
        warnings=(
            *competence_warnings(influences),
            *sample_warnings(len(effects[0]), config),
            *([] if paper is not None else [NO_PAPER]),
            *warnings,
        ),
        config=dict(config),
        versions=versions(),
    )


@dataclass(frozen=True)
class _Random:
    """One random student: its mean effects, and its similarities with the teacher."""

    effect: Float[np.ndarray, "student"]
    similarity: Float[np.ndarray, "teacher student"]
    paper: Float[np.ndarray, "teacher student"] | None


def _random(
    teacher: Components, influence: Influence, student: Components, measure: str
) -> _Random:
    return _Random(
        influence.effects.double().numpy().mean(0),
        component_similarity(teacher, student, measure=measure).value,
        _paper_table(teacher, student),
    )


def _paper_table(
    teacher: Components, student: Components
) -> Float[np.ndarray, "teacher student"] | None:
    """The paper's similarities; ``None`` for models of different widths."""
    if teacher.raw_mlp[0].shape[1] != student.raw_mlp[0].shape[1]:
        return None
    return paper_similarity(teacher, student)


@dataclass(frozen=True)
class _Method:
    """One alignment: its formula and the similarities that it is fed with."""

    name: str
    score: Score
    similarity: Float[np.ndarray, "teacher student"]
    draws: Float[np.ndarray, "draw teacher student"]
    own: Float[np.ndarray, "teacher teacher"]  # the teacher with itself
    own_score: Score  # the same formula for two copies of the teacher
    random: Sequence[Float[np.ndarray, "teacher student"] | None]


@dataclass(frozen=True)
class _Evidence:
    """What every alignment is computed from, and its evidence."""

    effects: tuple[np.ndarray, ...]
    components: tuple[Components, Components]
    weights: Int[np.ndarray, "draw prompt"]
    config: Mapping[str, Any]
    random: Sequence[_Random]
    progress: Progress | None

    @cached_property
    def paper_table(self) -> Float[np.ndarray, "teacher student"] | None:
        return _paper_table(*self.components)

    def alignments(self, similarity: ComponentSimilarity) -> Iterator[tuple[str, Alignment]]:
        methods = list(self._methods(similarity))
        for done, method in enumerate(methods):
            if self.progress is not None:
                self.progress("Weighing the evidence", done, len(methods))
            yield method.name, self._alignment(method)
        if self.progress is not None:
            self.progress("Weighing the evidence", len(methods), len(methods))

    def _methods(self, similarity: ComponentSimilarity) -> Iterator[_Method]:
        teacher = self.components[0]
        own = component_similarity(teacher, teacher, measure=self.config["measure"]).value
        random = [r.similarity for r in self.random]
        kinds, own_kinds = same_kind(*self.components), same_kind(teacher, teacher)
        ours = (similarity.value, similarity.draws, own)
        for name, score in (
            ("transport", transport_score),
            ("signed transport", signed_transport_score),
        ):
            yield _Method(name, score, *ours, score, random)
        weighted = [argmax_score(pairs, paper=False) for pairs in (kinds, own_kinds)]
        yield _Method("weighted argmax", weighted[0], *ours, weighted[1], random)
        if self.paper_table is not None:
            # The paper's similarities have no cheap bootstrap: its interval resamples influences.
            same = np.broadcast_to(self.paper_table, (len(self.weights), *self.paper_table.shape))
            theirs = (self.paper_table, same, paper_similarity(teacher, teacher))
            scores = [argmax_score(pairs, paper=True) for pairs in (kinds, own_kinds)]
            yield _Method("paper", scores[0], *theirs, scores[1], [r.paper for r in self.random])

    def _alignment(self, method: _Method) -> Alignment:
        teacher, student = (effect.mean(0) for effect in self.effects)
        n = len(self.effects[0])
        drawn = [self.weights @ effect / n for effect in self.effects]
        values = bootstrap_scores(method.score, drawn[0], drawn[1], method.draws)
        found = with_interval(
            method.score(teacher, student, method.similarity), values, method.name
        )
        if not self.config["null_draws"]:
            return found
        kinds = tuple([node.kind for node in side.nodes] for side in self.components)
        seed = self.config["seed"]
        floor = [
            (student.effect, table)
            for student, table in zip(self.random, method.random, strict=True)
            if table is not None
        ]
        return replace(
            found,
            null=shuffled_null(
                method.score,
                teacher,
                student,
                method.similarity,
                (kinds[0], kinds[1]),
                draws=self.config["null_draws"],
                seed=seed,
            ),
            ceiling=split_half_ceiling(method.own_score, self.effects[0], method.own, seed=seed),
            floor=random_floor(method.score, teacher, floor),
        )


def _weights(n: int, draws: int, seed: int) -> Int[np.ndarray, "draw prompt"]:
    return bootstrap_weights(n, draws, seed) if draws else np.zeros((0, n), dtype=np.int64)
