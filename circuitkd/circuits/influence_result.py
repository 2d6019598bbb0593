"""``Influence``: what ablating each node did, prompt by prompt, and how it prints."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from circuitkd.errors import InputError
from circuitkd.metrics import (
    UNITS,
    accuracy,
    bootstrap_interval,
    bootstrap_means,
    percentile_interval,
)
from circuitkd.nodes import Node

_TEXTS = ("model", "task", "variant", "bos", "ablation", "metric")


@dataclass(frozen=True)
class Influence:
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
    def unit(self) -> str:
        """Unit of effects and clean metric: ``logits`` or ``probability``."""
        return UNITS[self.metric]

    @cached_property
    def clean_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean clean metric, over prompts."""
        return bootstrap_interval(self.clean.double().numpy())

    @property
    def competent(self) -> bool:
        """Whether the model does the task: the interval of its clean metric lies above 0."""
        return self.clean_interval[0] > 0

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
        about = {key: json.dumps(getattr(self, key)) for key in _TEXTS}
        about["nodes"] = json.dumps([node.name for node in self.nodes])
        tensors = {"effects": self.effects.contiguous(), "clean": self.clean.contiguous()}
        save_file(tensors, path, metadata=about)

    @classmethod
    def load(cls, path: str | Path) -> "Influence":
        """Read what ``save`` wrote."""
        if not Path(path).is_file():
            raise InputError(f"There is no saved influence at {str(path)!r}.")
        with safe_open(path, framework="pt") as file:
            about = {key: json.loads(text) for key, text in file.metadata().items()}
            nodes = tuple(Node.parse(name) for name in about.pop("nodes"))
            tensors = {key: file.get_tensor(key) for key in ("effects", "clean")}
        return cls(nodes=nodes, **about, **tensors)

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
