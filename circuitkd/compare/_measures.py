"""The table of measures: what each looks at, its range, its chance level, what leaves it unchanged.

A new measure is one more entry here; nothing else asks for names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from circuitkd.compare._measures_output import (
    Rows,
    centred,
    debiased_cka,
    principal_angles,
    procrustes,
    svcca,
)
from circuitkd.compare._measures_paper import paper_mlp
from circuitkd.compare._patterns import (
    circuit_correlation,
    deviation_cosine,
    mean_row_cosine,
    one_minus_js,
    raw_cosine,
)
from circuitkd.errors import InputError

Invariance = Literal["translation", "scale", "rotation", "row constant"]


@dataclass(frozen=True)
class Measure:
    """One way to compare two arrays.

    Attributes:
        on: what it looks at: a component's ``output`` [row, feature], an attention ``pattern``
            [query, key], or a ``circuit``'s scores from word to word [query, key].
        compare: of two arrays in float64.
        low, high: its range.
        chance: what unrelated arrays score.
        invariances: what may be done to either array alone without changing the value: adding one
            row to all rows, multiplying by a positive number, rotating features (into more
            dimensions, too), adding a constant to each row.
        source: where it comes from.
        same_shape: whether both arrays need equally many columns.
    """

    on: Literal["output", "pattern", "circuit"]
    compare: Callable[[Rows, Rows], float]
    low: float
    high: float
    chance: str
    invariances: frozenset[Invariance]
    source: str
    same_shape: bool = True


def _of_centred(measure: Callable[[Rows, Rows], float]) -> Callable[[Rows, Rows], float]:
    def compare(x: Rows, y: Rows) -> float:
        if len(x) < 2:
            raise InputError(f"One row says nothing about what varies: take more than {len(x)}.")
        return measure(centred(np.asarray(x)), centred(np.asarray(y)))

    return compare


_RIGID: frozenset[Invariance] = frozenset({"translation", "scale", "rotation"})
_WORDS = "0 for independent scores; shared preferences for some words lift it"

MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "cka": Measure(
            "output",
            debiased_cka,
            -1.0,
            1.0,
            "0",
            _RIGID,
            "Kornblith et al. 2019; debiased: Song et al. 2012, Nguyen et al. 2021",
            same_shape=False,
        ),
        "procrustes": Measure(
            "output",
            _of_centred(procrustes),
            0.0,
            1.0,
            "about min(d, d') / n",
            _RIGID,
            "Schönemann 1966; Williams et al. 2021",
            same_shape=False,
        ),
        "principal_angles": Measure(
            "output",
            _of_centred(principal_angles),
            0.0,
            1.0,
            "k / (n − 1)",
            _RIGID,
            "Björck & Golub 1973",
            same_shape=False,
        ),
        "svcca": Measure(
            "output",
            _of_centred(svcca),
            0.0,
            1.0,
            "about √(max(k, k') / n)",
            _RIGID,
            "Raghu et al. 2017",
            same_shape=False,
        ),
        "attention_correlation": Measure(
            "pattern",
            deviation_cosine,
            -1.0,
            1.0,
            "0, but positive for heads that share a habit, such as a look at the first token",
            frozenset({"scale"}),
            "Pearson, with uniform attention as the mean",
        ),
        "attention_cosine": Measure(
            "pattern",
            raw_cosine,
            -1.0,
            1.0,
            "about 0.7: every head looks at the first token",
            frozenset({"scale"}),
            "flattened patterns, as in the paper's BERT and Llama scripts",
        ),
        "attention_js": Measure(
            "pattern",
            one_minus_js,
            0.0,
            1.0,
            "far above 0, like the raw cosine's",
            frozenset(),
            "Lin 1991",
        ),
        "qk_circuit": Measure(
            "circuit",
            circuit_correlation,
            -1.0,
            1.0,
            _WORDS,
            frozenset({"scale", "row constant"}),
            "circuits: Elhage et al. 2021",
        ),
        "ov_circuit": Measure(
            "circuit",
            circuit_correlation,
            -1.0,
            1.0,
            _WORDS,
            frozenset({"scale", "row constant"}),
            "circuits: Elhage et al. 2021",
        ),
        "paper_mlp": Measure(
            "output",
            paper_mlp,
            0.0,
            1.0,
            "about 0.1 in few dimensions; identical arrays score 1/3",
            frozenset({"scale"}),
            "Haskins & Adams 2025",
        ),
        "paper_head": Measure(
            "pattern",
            mean_row_cosine,
            -1.0,
            1.0,
            "about 0.7, like the raw cosine's",
            frozenset({"scale"}),
            "Haskins & Adams 2025",
        ),
    }
)
