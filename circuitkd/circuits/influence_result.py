"""``Influence``: what ablating each node did, prompt by prompt, and how it prints."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits._clean_metric import CleanMetric
from circuitkd.circuits._saved import opened_numbers, write_numbers
from circuitkd.metrics import accuracy, bootstrap_means, percentile_interval
from circuitkd.nodes import Node

_TEXTS = ("model", "task", "variant", "bos", "ablation", "metric")


@dataclass(frozen=True)
class Influence(CleanMetric):
    """The effect of ablating each head and MLP of one model, one at a time.

    ``effects`` [prompt, node] = metric(ablated) - metric(clean), in the metric's unit; negative
    means that the node helps. ``clean`` [prompt] is the clean metric. Prompts are in sampling
    order. Effects say what a node does while all others are there: two nodes that can replace each
    other may both show none.
    """

    model: str
    task: str
    variant: str | None
    bos: str | None
    ablation: str
    metric: str
    nodes: tuple[Node, ...]
    effects: Float[Tensor, "prompt node"]
    clean: Float[Tensor, "prompt"]

    @property
    def accuracy(self) -> float:
        """Share of prompts where the right answer beats the wrong one."""
        return accuracy(self.clean)

    def share(self) -> Float[np.ndarray, "node"]:
        """Influence normalised to sum 1 over all nodes; all 0 where no node has any."""
        return shares(self.effects.double().numpy().mean(0))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a node: node, kind, layer, head, effect, effect_low, effect_high, drop_pct,
        influence, share.

        ``effect`` is the mean over prompts with its 95 % bootstrap interval. ``drop_pct`` =
        -100 effect / mean clean metric is withheld (NaN) where the model is not competent.
        ``influence`` = abs(effect).
        """
        effects = self.effects.double().numpy()
        effect = effects.mean(0)
        low, high = percentile_interval(bootstrap_means(effects, draws=1000))
        baseline = float(self.clean.double().mean()) if self.competent else np.nan
        return pd.DataFrame(
            {
                "node": [node.name for node in self.nodes],
                "kind": [node.kind for node in self.nodes],
                "layer": [node.layer for node in self.nodes],
                "head": pd.array([node.head for node in self.nodes], dtype="Int64"),
                "effect": effect,
                "effect_low": low,
                "effect_high": high,
                "drop_pct": -100 * effect / baseline,
                "influence": np.abs(effect),
                "share": self.share(),
            }
        )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        about = {key: getattr(self, key) for key in _TEXTS}
        about["nodes"] = [node.name for node in self.nodes]
        write_numbers(path, about, {"effects": self.effects, "clean": self.clean})

    @classmethod
    def load(cls, path: str | Path) -> "Influence":
        """Read what ``save`` wrote."""
        with opened_numbers(path, cls.__name__) as (about, tensors):
            nodes = tuple(Node.parse(name) for name in about.pop("nodes"))
            return cls(nodes=nodes, effects=tensors["effects"], clean=tensors["clean"], **about)

    def __repr__(self) -> str:
        low, high = self.clean_interval
        top = self.frame.sort_values("influence", ascending=False).head(8)
        lines = [
            f"Influence of {len(self.nodes)} nodes of {self.model} on {self.task}, "
            f"{self.ablation} ablation, {len(self.clean)} prompts",
            f"clean metric {float(self.clean.mean()):.3f} [{low:.3f}, {high:.3f}] {self.unit}"
            + ("" if self.competent else ": the model does not do this task"),
        ]
        lines += [
            f"  {Node.parse(str(row.node)).label:>8}  {row.effect:+.3f} "
            f"[{row.effect_low:+.3f}, {row.effect_high:+.3f}] {self.unit}"
            for row in top.itertuples()
        ]
        return "\n".join(lines)


def shares(effect: Float[np.ndarray, "*draw node"]) -> Float[np.ndarray, "*draw node"]:
    """abs(effect) normalised to sum 1 over the last axis; all 0 where every effect is 0.

    >>> shares(np.array([3.0, -1.0]))
    array([0.75, 0.25])
    """
    influence = np.abs(effect)
    total = influence.sum(-1, keepdims=True)
    return np.divide(influence, total, out=np.zeros_like(influence), where=total > 0)
