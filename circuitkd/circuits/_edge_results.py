"""What edges do, prompt by prompt: exact effects and estimates, and how they print."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.stats import spearmanr
from torch import Tensor

from circuitkd.circuits._clean_metric import CleanMetric
from circuitkd.circuits._saved import opened_numbers, write_numbers
from circuitkd.circuits.edges import Edge
from circuitkd.metrics import UNITS, bootstrap_means, percentile_interval
from circuitkd.nodes import Node

_COLUMNS_AT_ONCE = 2048  # bootstrap draws of all 32,491 edges of GPT-2 would take 260 MB


@dataclass(frozen=True, eq=False)
class EdgeEffects(CleanMetric):
    """The exact effect of patching each edge of one model, one at a time.

    ``effects`` [prompt, edge] = metric(patched) - metric(clean), in the metric's unit; negative
    means that what the sender says along this edge helps. ``clean`` [prompt] is the clean metric.
    Prompts are in sampling order. ``mode`` says what lies between sender and receiver: ``direct``
    keeps all of it clean, ``through-mlps`` recomputes the MLPs. ``ablation`` says what the sender
    is replaced by.
    """

    model: str
    task: str
    variant: str | None
    bos: str | None
    mode: str
    ablation: str
    metric: str
    edges: tuple[Edge, ...]
    effects: Float[Tensor, "prompt edge"]
    clean: Float[Tensor, "prompt"]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row an edge: edge, sender, receiver, kind, effect, effect_low, effect_high.

        ``kind`` is that of the receiver. ``effect`` is the mean over prompts with its 95 %
        bootstrap interval.
        """
        mean, low, high = _with_interval(self.effects)
        return _edge_columns(self.edges).assign(effect=mean, effect_low=low, effect_high=high)

    @property
    def by_edge(self) -> dict[Edge, float]:
        """Edge -> mean effect over prompts."""
        return dict(zip(self.edges, self.effects.double().mean(0).tolist(), strict=True))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        texts = ("model", "task", "variant", "bos", "mode", "ablation", "metric")
        about = {key: getattr(self, key) for key in texts}
        about["edges"] = [edge.name for edge in self.edges]
        write_numbers(path, about, {"effects": self.effects, "clean": self.clean})

    @classmethod
    def load(cls, path: str | Path) -> "EdgeEffects":
        """Read what ``save`` wrote."""
        with opened_numbers(path, cls.__name__) as (about, tensors):
            edges = tuple(Edge.parse(name) for name in about.pop("edges"))
            return cls(edges=edges, effects=tensors["effects"], clean=tensors["clean"], **about)

    def __repr__(self) -> str:
        low, high = self.clean_interval
        rows = _strongest(self.frame.rename(columns={"effect": "score"}))
        lines = [
            f"Effects of {len(self.edges)} edges of {self.model} on {self.task}, path patching "
            f"({self.mode}, {self.ablation}), {len(self.clean)} prompts",
            f"clean metric {float(self.clean.mean()):.3f} [{low:.3f}, {high:.3f}] {self.unit}"
            + ("" if self.competent else ": the model does not do this task"),
        ]
        lines += [
            f"  {row['edge']:>22}  {row['score']:+.3f} "
            f"[{row['effect_low']:+.3f}, {row['effect_high']:+.3f}] {self.unit}"
            for row in rows
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """Gradient estimates of the effect of patching each edge.

    ``scores`` [prompt, edge] estimates metric(patched) - metric(clean), in the metric's unit, with
    the sign of ``EdgeEffects`` (``direct``): negative means that the edge helps. Where ``verified``
    is there (``method="auto"``), it holds the exact effects of the edges with the largest
    estimates.
    """

    model: str
    task: str
    variant: str | None
    bos: str | None
    method: str
    steps: int
    ablation: str
    metric: str
    edges: tuple[Edge, ...]
    scores: Float[Tensor, "prompt edge"]
    verified: EdgeEffects | None = None

    @property
    def unit(self) -> str:
        """Unit of the scores: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def exact(self) -> Bool[np.ndarray, "edge"]:
        """Which edges were verified by path patching."""
        known = set() if self.verified is None else set(self.verified.edges)
        return np.array([edge in known for edge in self.edges])

    @property
    def rank_correlation(self) -> float:
        """Spearman correlation of mean estimate and mean exact effect over the verified edges.

        NaN where fewer than two edges are verified, or where either does not vary.
        """
        estimate = self.frame["estimate"].to_numpy()[self.exact]
        score = self.frame["score"].to_numpy()[self.exact]
        if len(score) < 2 or np.ptp(estimate) == 0 or np.ptp(score) == 0:
            return float("nan")
        return float(spearmanr(estimate, score)[0])  # pyright: ignore[reportArgumentType]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row an edge: edge, sender, receiver, kind, score, exact, estimate.

        ``score`` is the mean over prompts of the exact effect where ``exact``, else ``estimate``,
        the mean estimate.
        """
        estimate = self.scores.double().mean(0).numpy()
        score = pd.Series(estimate, index=[edge.name for edge in self.edges])
        if self.verified is not None:
            names = [edge.name for edge in self.verified.edges]
            score[names] = self.verified.effects.double().mean(0).numpy()
        return _edge_columns(self.edges).assign(
            score=score.to_numpy(), exact=self.exact, estimate=estimate
        )

    @property
    def by_edge(self) -> dict[Edge, float]:
        """Edge -> mean effect over prompts: exact where it was verified, else estimated."""
        return dict(zip(self.edges, self.frame["score"].tolist(), strict=True))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        texts = ("model", "task", "variant", "bos", "method", "steps", "ablation", "metric")
        about: dict[str, Any] = {key: getattr(self, key) for key in texts}
        about["edges"] = [edge.name for edge in self.edges]
        tensors = {"scores": self.scores}
        if self.verified is not None:
            about["verified"] = [edge.name for edge in self.verified.edges]
            about["mode"] = self.verified.mode
            tensors |= {"effects": self.verified.effects, "clean": self.verified.clean}
        write_numbers(path, about, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "EdgeScores":
        """Read what ``save`` wrote."""
        with opened_numbers(path, cls.__name__) as (about, tensors):
            edges = tuple(Edge.parse(name) for name in about.pop("edges"))
            known, mode = about.pop("verified", None), about.pop("mode", None)
            verified = None
            if known is not None:
                shared = ("model", "task", "variant", "bos", "ablation", "metric")
                verified = EdgeEffects(
                    **{key: about[key] for key in shared},
                    mode=mode,
                    edges=tuple(Edge.parse(name) for name in known),
                    effects=tensors["effects"],
                    clean=tensors["clean"],
                )
            return cls(edges=edges, scores=tensors["scores"], verified=verified, **about)

    def __repr__(self) -> str:
        steps = f", {self.steps} steps" if self.steps > 1 else ""
        lines = [
            f"Estimated effects of {len(self.edges)} edges of {self.model} on {self.task}, "
            f"{self.method} ({self.ablation}{steps}), {len(self.scores)} prompts"
        ]
        if self.verified is not None:
            lines.append(
                f"{int(self.exact.sum())} verified by path patching; rank correlation of estimate "
                f"and exact effect on them {self.rank_correlation:.2f}"
            )
        lines += [
            f"  {row['edge']:>22}  {row['score']:+.3f} {self.unit} "
            f"({'exact' if row['exact'] else 'estimate'})"
            for row in _strongest(self.frame)
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class NodeScores:
    """Gradient estimates of the effect of replacing each head and MLP.

    ``scores`` [prompt, node] estimates metric(replaced) - metric(clean), in the metric's unit;
    negative means that the node helps.
    """

    model: str
    task: str
    variant: str | None
    bos: str | None
    method: str
    ablation: str
    metric: str
    nodes: tuple[Node, ...]
    scores: Float[Tensor, "prompt node"]

    @property
    def unit(self) -> str:
        """Unit of the scores: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a node: node, kind, layer, head, score (mean over prompts)."""
        return pd.DataFrame(
            {
                "node": [node.name for node in self.nodes],
                "kind": [node.kind for node in self.nodes],
                "layer": [node.layer for node in self.nodes],
                "head": pd.array([node.head for node in self.nodes], dtype="Int64"),
                "score": self.scores.double().mean(0).numpy(),
            }
        )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        texts = ("model", "task", "variant", "bos", "method", "ablation", "metric")
        about: dict[str, Any] = {key: getattr(self, key) for key in texts}
        about["nodes"] = [node.name for node in self.nodes]
        write_numbers(path, about, {"scores": self.scores})

    @classmethod
    def load(cls, path: str | Path) -> "NodeScores":
        """Read what ``save`` wrote."""
        with opened_numbers(path, cls.__name__) as (about, tensors):
            nodes = tuple(Node.parse(name) for name in about.pop("nodes"))
            return cls(nodes=nodes, scores=tensors["scores"], **about)

    def __repr__(self) -> str:
        head = (
            f"Estimated effects of {len(self.nodes)} nodes of {self.model} on {self.task}, "
            f"{self.method} ({self.ablation}), {len(self.scores)} prompts"
        )
        return "\n".join(
            [
                head,
                *(
                    f"  {Node.parse(row['node']).label:>8}  {row['score']:+.3f} {self.unit}"
                    for row in _strongest(self.frame)
                ),
            ]
        )


def _strongest(frame: pd.DataFrame) -> list[dict[str, Any]]:
    strongest = frame["score"].abs().nlargest(8).index
    return [
        {str(key): value for key, value in row.items()}
        for _, row in frame.loc[strongest].iterrows()
    ]


def _edge_columns(edges: Sequence[Edge]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "edge": [edge.name for edge in edges],
            "sender": [edge.sender.name for edge in edges],
            "receiver": [edge.receiver.name for edge in edges],
            "kind": [edge.receiver.kind for edge in edges],
        }
    )


def _with_interval(values: Float[Tensor, "prompt edge"]) -> tuple[np.ndarray, ...]:
    parts = []
    for columns in values.double().split(_COLUMNS_AT_ONCE, dim=1):
        array = columns.numpy()
        low, high = percentile_interval(bootstrap_means(array, draws=1000))
        parts.append(np.stack([array.mean(0), low, high]))
    return tuple(np.concatenate(parts, 1))
