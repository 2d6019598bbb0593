"""The tables of ``ResidualPCA``: figures of pairs of sites, their chance levels, projections."""

from typing import Any

import numpy as np
import pandas as pd

from circuitkd.compare._pca import (
    Projection,
    Scores,
    aligned,
    canonical_correlations,
    held_out_cosines,
    procrustes_residual,
)
from circuitkd.metrics import bootstrap_means, percentile_interval


class SitePair:
    """A teacher's and a student's site, the student's prompts in a given order.

    Only the first ``components`` are aligned; SVCCA takes those that hold ``variance``.
    """

    def __init__(
        self,
        teacher: Projection,
        student: Projection,
        components: int,
        variance: float,
        order: np.ndarray | None = None,
    ) -> None:
        place = slice(None) if order is None else order
        k = min(components, teacher.scores.shape[-1], student.scores.shape[-1])
        self.fixed: Scores = teacher.first(k)
        self.moved: Scores = student.first(k)[place]
        self.cosines = held_out_cosines(self.fixed, self.moved)
        self._svcca = canonical_correlations(
            teacher.first(teacher.enough_for(variance)),
            student.first(student.enough_for(variance))[place],
        )

    def figures(self) -> dict[str, float]:
        """The columns of ``ResidualPCA.pairs`` that have a chance level."""
        correlations = canonical_correlations(self.fixed, self.moved)
        return {
            "residual": procrustes_residual(self.fixed, self.moved),
            "cosine": float(self.cosines.mean()),
            "cca_mean": float(correlations.mean()),
            "cca_max": float(correlations.max()),
            "svcca": float(self._svcca.mean()),
        }


def with_chance(pair: SitePair, chance: list[SitePair]) -> dict[str, float]:
    """One row of ``ResidualPCA.pairs``: every figure, and its mean over shuffled pairs."""
    shuffled = [other.figures() for other in chance]
    found = {"scale": aligned(pair.fixed, pair.moved)[1]}
    for name, value in pair.figures().items():
        found[name] = value
        found[f"{name}_chance"] = float(np.mean([figures[name] for figures in shuffled]))
    return found


def cosine_frame(
    where: dict[str, Any], labels: tuple[str, ...], pair: SitePair, chance: list[SitePair]
) -> pd.DataFrame:
    """The rows of ``ResidualPCA.cosines`` for one pair."""
    low, high = percentile_interval(bootstrap_means(pair.cosines, draws=1000))
    return pd.DataFrame(
        {
            **where,
            "label": list(labels),
            "cosine": pair.cosines.mean(0),
            "low": low,
            "high": high,
            "chance": np.mean([other.cosines.mean(0) for other in chance], axis=0),
        }
    )


def projection_frame(
    where: dict[str, Any], labels: tuple[str, ...], pair: SitePair
) -> pd.DataFrame:
    """The rows of ``ResidualPCA.projections`` for one pair."""
    n_prompts, n_labels, k = pair.fixed.shape
    place = {
        "prompt": np.repeat(np.arange(n_prompts), n_labels),
        "label": list(labels) * n_prompts,
    }
    scores = {"teacher": pair.fixed, "student": aligned(pair.fixed, pair.moved)[0]}
    names = [f"pc{number + 1}" for number in range(k)]
    return pd.concat(
        pd.DataFrame(
            {**where, "side": side, **place}
            | dict(zip(names, values.reshape(-1, k).T, strict=True))
        )
        for side, values in scores.items()
    )


def variance_frame(
    fitted: dict[tuple[str, str], list[Projection]], components: int
) -> pd.DataFrame:
    """``ResidualPCA.variance``."""
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "side": side,
                    "site": site,
                    "layer": layer,
                    "component": np.arange(1, len(ratio) + 1),
                    "ratio": ratio,
                    "cumulative": np.cumsum(ratio),
                }
            )
            for (side, site), layers in fitted.items()
            for layer, projection in enumerate(layers)
            for ratio in [projection.ratio[:components]]
        ],
        ignore_index=True,
    )
