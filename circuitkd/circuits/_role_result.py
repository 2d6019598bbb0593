"""``HeadRoles``: how much each head has of each role, sample by sample, and how it prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits._saved import opened_numbers, write_numbers
from circuitkd.errors import InputError
from circuitkd.metrics import bootstrap_means, percentile_interval
from circuitkd.nodes import Node

PREVIOUS, DUPLICATE, INDUCTION = "previous token", "duplicate token", "induction"
MEMBER, LAST_MEMBER, SUCCESSOR = "sequence member", "last member mover", "successor"
MOVER, NEGATIVE_MOVER, INHIBITION = "name mover", "negative name mover", "S-inhibition"
ON_PROBES = (PREVIOUS, DUPLICATE, INDUCTION)
ROLES = (
    *ON_PROBES,
    MEMBER,
    LAST_MEMBER,
    SUCCESSOR,
    MOVER,
    NEGATIVE_MOVER,
    INHIBITION,
)
_LEAST = 0.25


@dataclass(frozen=True, eq=False)
class HeadRoles:
    """Scores of all heads of one model for all roles that its task has.

    Attributes:
        model: the model's name.
        task: the task's name.
        nodes: the heads, in the order of every head axis.
        scores: role -> scores [sample, head]; a sample is a prompt in sampling order, or a probe
            for the roles in ``ON_PROBES``.
        baselines: role -> the score of a head that attends to everything alike.
        skipped: role -> why it was left out.
    """

    model: str
    task: str
    nodes: tuple[Node, ...]
    scores: Mapping[str, Float[Tensor, "_ head"]]
    baselines: Mapping[str, float]
    skipped: Mapping[str, str]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each role and head: node, layer, head, role, score, low, high, baseline,
        samples.

        ``low`` and ``high`` are a 95 % bootstrap interval over the samples, which are
        ``"prompts"`` or ``"probes"``.
        """
        parts = [self._role_frame(role) for role in ROLES if role in self.scores]
        return pd.concat(parts, ignore_index=True)

    def holders(self, role: str, least: float = _LEAST) -> dict[Node, float]:
        """The heads that have a role, with their scores, strongest first.

        A head has it where the whole interval lies above the baseline and the score, rescaled so
        that the baseline is 0 and 1 stays 1, is at least ``least``. The default asks for a quarter:
        a convention, as all thresholds on roles are.

        Raises:
            InputError: an unknown role, or one that the task does not have.
        """
        if role not in self.scores:
            reason = self.skipped.get(role, f"roles are {', '.join(ROLES)}")
            raise InputError(f"There are no scores for {role!r}: {reason}.")
        frame = self._role_frame(role)
        baseline = self.baselines[role]
        enough = (frame["score"] - baseline >= least * (1 - baseline)) & (frame["low"] > baseline)
        held = {
            node: float(score)
            for node, score, holds in zip(self.nodes, frame["score"], enough, strict=True)
            if holds
        }
        return dict(sorted(held.items(), key=lambda item: -item[1]))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        about: dict[str, Any] = {name: getattr(self, name) for name in ("model", "task")}
        about |= {name: dict(getattr(self, name)) for name in ("baselines", "skipped")}
        about["nodes"] = [node.name for node in self.nodes]
        write_numbers(path, about, self.scores)

    @classmethod
    def load(cls, path: str | Path) -> "HeadRoles":
        """Read what ``save`` wrote."""
        with opened_numbers(path, cls.__name__) as (about, tensors):
            nodes = tuple(Node.parse(name) for name in about.pop("nodes"))
            scores = {role: tensors[role] for role in about["baselines"]}
            return cls(nodes=nodes, scores=scores, **about)

    def _role_frame(self, role: str) -> pd.DataFrame:
        values = self.scores[role].double().numpy()
        low, high = percentile_interval(bootstrap_means(values, draws=1000))
        return pd.DataFrame(
            {
                "node": [node.name for node in self.nodes],
                "layer": [node.layer for node in self.nodes],
                "head": [node.head for node in self.nodes],
                "role": role,
                "score": values.mean(0),
                "low": low,
                "high": high,
                "baseline": self.baselines[role],
                "samples": "probes" if role in ON_PROBES else "prompts",
            }
        )

    def __repr__(self) -> str:
        lines = [f"Roles of the heads of {self.model} on {self.task} (score; uniform head):"]
        for role in ROLES:
            if role in self.skipped:
                lines.append(f"  {role:<20} left out: {self.skipped[role]}")
            elif role in self.scores:
                held = [f"{n.label} {score:.2f}" for n, score in self.holders(role).items()]
                shown = ", ".join(held[:6]) + (f", and {len(held) - 6} more" if held[6:] else "")
                lines.append(f"  {role:<20} {shown or 'none'} ({self.baselines[role]:.2f})")
        return "\n".join(lines)
