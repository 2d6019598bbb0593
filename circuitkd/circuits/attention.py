"""Where heads look: attention patterns at labelled positions, head roles, QK and OV circuits.

A pattern is averaged over prompts and read at a task's labelled positions (``S1``, ``IO``,
``END``), never at token numbers, so that prompts of different lengths, and models with different
tokenizers, can be compared. Words of several tokens are looked at where their last token is.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._attention_words import ov_circuit, qk_circuit
from circuitkd.circuits._head_patterns import layer_patterns, uniform_pattern
from circuitkd.circuits.influence import Progress
from circuitkd.circuits.roles import ROLES, HeadRoles, head_roles
from circuitkd.errors import InputError
from circuitkd.metrics import bootstrap_means, percentile_interval
from circuitkd.models import component_nodes_of, model_label
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

__all__ = [
    "BOS",
    "REST",
    "ROLES",
    "AttentionPatterns",
    "HeadRoles",
    "attention_patterns",
    "head_roles",
    "ov_circuit",
    "qk_circuit",
]

BOS, REST = "BOS", "rest"
_END = "END"
_ABOUT = ("model", "task", "labels", "keys")


@dataclass(frozen=True, eq=False)
class AttentionPatterns:
    """Attention of all heads of one model on a task's prompts.

    Attributes:
        model: the model's name.
        task: the task's name.
        nodes: the heads, in the order of every head axis.
        labels: the query positions: those labels that every prompt has, ``END`` last.
        keys: the key positions: the labels, ``BOS`` where prompts have one, and ``rest`` for all
            other tokens together, so that a row sums to 1.
        labelled: attention of each prompt, in sampling order, from label to key.
        uniform: the same for a head that looks at all tokens up to its own alike.
        groups: for each group of prompts, the pattern averaged over its prompts, token by token.
    """

    model: str
    task: str
    nodes: tuple[Node, ...]
    labels: tuple[str, ...]
    keys: tuple[str, ...]
    labelled: Float[Tensor, "prompt head query key"]
    uniform: Float[Tensor, "prompt query key"]
    groups: tuple[Float[Tensor, "head _ _"], ...]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each head, query and key: node, layer, head, query, key, attention, low,
        high, uniform. ``low`` and ``high`` are a 95 % bootstrap interval over prompts.
        """
        values = self.labelled.double().flatten(1).numpy()
        low, high = percentile_interval(bootstrap_means(values, draws=1000))
        uniform = self.uniform.double().mean(0).flatten().numpy()
        cells = [(query, key) for query in self.labels for key in self.keys]
        nodes = [node for node in self.nodes for _ in cells]
        return pd.DataFrame(
            {
                "node": [node.name for node in nodes],
                "layer": [node.layer for node in nodes],
                "head": [node.head for node in nodes],
                "query": [query for query, _ in cells] * len(self.nodes),
                "key": [key for _, key in cells] * len(self.nodes),
                "attention": values.mean(0),
                "low": low,
                "high": high,
                "uniform": np.tile(uniform, len(self.nodes)),
            }
        )

    def table(self, node: Node | str) -> pd.DataFrame:
        """Mean attention of one head, a row for each query label and a column for each key."""
        node = node if isinstance(node, Node) else Node.parse(node)
        if node not in self.nodes:
            raise InputError(f"{self.model} has no head {node.name}.")
        values = self.labelled[:, self.nodes.index(node)].double().mean(0).numpy()
        return pd.DataFrame(values, index=list(self.labels), columns=list(self.keys))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; what is not a number is in its header."""
        about = {name: json.dumps(getattr(self, name)) for name in _ABOUT}
        about["nodes"] = json.dumps([node.name for node in self.nodes])
        tensors = {f"group.{n}": group.contiguous() for n, group in enumerate(self.groups)}
        tensors["labelled"] = self.labelled.contiguous()
        tensors["uniform"] = self.uniform.contiguous()
        save_file(tensors, path, metadata=about)

    @classmethod
    def load(cls, path: str | Path) -> "AttentionPatterns":
        """Read what ``save`` wrote."""
        if not Path(path).is_file():
            raise InputError(f"There are no saved attention patterns at {str(path)!r}.")
        with safe_open(path, framework="pt") as file:
            about = {name: json.loads(text) for name, text in file.metadata().items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        n_groups = len(tensors) - 2
        return cls(
            model=about["model"],
            task=about["task"],
            nodes=tuple(Node.parse(name) for name in about["nodes"]),
            labels=tuple(about["labels"]),
            keys=tuple(about["keys"]),
            labelled=tensors["labelled"],
            uniform=tensors["uniform"],
            groups=tuple(tensors[f"group.{n}"] for n in range(n_groups)),
        )

    def __repr__(self) -> str:
        lines = [
            f"Attention of {len(self.nodes)} heads of {self.model} on {self.task}, "
            f"{len(self.labelled)} prompts; from {_END}, strongest first:"
        ]
        at_end = self.frame.query("query == @_END and key in @self.labels")
        for row in at_end.sort_values("attention", ascending=False).head(8).itertuples():
            lines.append(
                f"  {Node.parse(str(row.node)).label:>6} → {row.key:<4} "
                f"{row.attention:.2f} [{row.low:.2f}, {row.high:.2f}], uniform {row.uniform:.2f}"
            )
        return "\n".join(lines)


@torch.no_grad()
def attention_patterns(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> AttentionPatterns:
    """Attention patterns on the clean prompts, averaged and read at labelled positions.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` or ``task.sample_pair`` with this model. For a pair of models
            the two results have the same labels, prompts and groups in the same order.
        batch_size: prompts that go through the model at once.
        progress: called as ``progress(stage, done, total)``, done and total in groups.

    Raises:
        InputError: no prompts, or no label that all prompts have.
        ArchitectureError: the engine does not understand the network.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("ioi").sample(student, n=8)
    >>> patterns = attention_patterns(student, prompts)
    >>> patterns.keys
    ('IO', 'S1', 'S2', 'END', 'rest')
    >>> bool(abs(patterns.labelled.sum(-1) - 1).max() < 1e-5)
    True
    """
    labels = _shared_labels(prompts)
    heads = tuple(node for node in component_nodes_of(model) if node.kind == "head")
    keys = (*labels, *([BOS] if prompts.bos else []), REST)
    labelled = torch.zeros(len(prompts), len(heads), len(labels), len(keys))
    uniform = torch.zeros(len(prompts), len(labels), len(keys))
    groups = []
    for number, group in enumerate(prompts.groups):
        queries, members = _places(group, labels, bos=prompts.bos is not None)
        averages = []
        for layer, pattern in enumerate(layer_patterns(model, group.clean, batch_size)):
            averages.append(pattern.mean(0))
            own = slice(layer * model.cfg.n_heads, (layer + 1) * model.cfg.n_heads)
            labelled[group.index, own] = _at_labels(pattern, queries, members)
        groups.append(torch.cat(averages))
        n_pos = group.clean.shape[1]
        even = uniform_pattern(n_pos).expand(len(group), 1, n_pos, n_pos)
        uniform[group.index] = _at_labels(even, queries, members)[:, 0]
        if progress is not None:
            progress(f"Attention of {model_label(model)}", number + 1, len(prompts.groups))
    return AttentionPatterns(
        model=model_label(model),
        task=prompts.task,
        nodes=heads,
        labels=labels,
        keys=keys,
        labelled=labelled,
        uniform=uniform,
        groups=tuple(groups),
    )


def _shared_labels(prompts: Prompts) -> tuple[str, ...]:
    if len(prompts) == 0:
        raise InputError("There are no prompts to look at.")
    shared = set.intersection(*(set(group.positions) for group in prompts.groups))
    if not shared:
        raise InputError("No label is in all prompts, so there is no position to look at.")
    labels = [label for label in prompts.groups[0].positions if label in shared and label != _END]
    return (*labels, *([_END] if _END in shared else []))


def _places(
    group: PromptGroup, labels: tuple[str, ...], *, bos: bool
) -> tuple[Int[Tensor, "batch query"], Bool[Tensor, "batch key pos"]]:
    """Positions of the queries, and which positions belong to which key."""
    queries = torch.stack([group.positions[label] for label in labels], 1)
    n_pos = group.clean.shape[1]
    named = queries
    if bos:
        named = torch.cat([queries, torch.zeros_like(queries[:, :1])], 1)
    members = torch.nn.functional.one_hot(named, n_pos).bool()
    return queries, torch.cat([members, ~members.any(1, keepdim=True)], 1)


def _at_labels(
    pattern: Float[Tensor, "batch head query key"],
    queries: Int[Tensor, "batch label"],
    members: Bool[Tensor, "batch place key"],
) -> Float[Tensor, "batch head label place"]:
    rows = pattern.take_along_dim(queries[:, None, :, None], dim=2)
    return rows @ members[:, None].to(rows.dtype).mT
