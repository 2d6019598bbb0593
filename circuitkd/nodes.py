"""Names of a model's nodes and their order.

A node is an attention head (``a9.h6``: head 6 of layer 9), an MLP (``m3``), the embedded input
(``input``) or the logits (``logits``). These are the names of EAP-IG and of the MIB benchmark, so
circuit files can be exchanged. People read ``9.6`` and ``MLP 3``.
"""

import re
from dataclasses import dataclass
from typing import Literal

from circuitkd.errors import InputError

NodeKind = Literal["input", "head", "mlp", "logits"]

_HEAD = re.compile(r"a(\d+)\.h(\d+)")
_MLP = re.compile(r"m(\d+)")


@dataclass(frozen=True)
class Node:
    """One node of a model.

    >>> Node.parse("a9.h6")
    Node(kind='head', layer=9, head=6)
    >>> Node.mlp(3).name, Node.mlp(3).label
    ('m3', 'MLP 3')
    """

    kind: NodeKind
    layer: int | None = None
    head: int | None = None

    def __post_init__(self) -> None:
        has = (self.layer is not None, self.head is not None)
        wanted = {"head": (True, True), "mlp": (True, False)}.get(self.kind, (False, False))
        if has != wanted:
            raise InputError(
                f"A node of kind {self.kind!r} cannot have layer={self.layer}, head={self.head}."
            )

    @classmethod
    def attention_head(cls, layer: int, head: int) -> "Node":
        return cls("head", layer, head)

    @classmethod
    def mlp(cls, layer: int) -> "Node":
        return cls("mlp", layer)

    @classmethod
    def parse(cls, name: str) -> "Node":
        """The node called ``name``; ``InputError`` where it is not a node's name."""
        if match := _HEAD.fullmatch(name):
            return cls.attention_head(int(match[1]), int(match[2]))
        if match := _MLP.fullmatch(name):
            return cls.mlp(int(match[1]))
        if name == "input":
            return cls("input")
        if name == "logits":
            return cls("logits")
        raise InputError(
            f"{name!r} is not a node. Nodes are called a<layer>.h<head>, m<layer>, input, logits."
        )

    @property
    def name(self) -> str:
        """The name in files: ``a9.h6``, ``m3``, ``input``, ``logits``."""
        if self.kind == "head":
            return f"a{self.layer}.h{self.head}"
        return f"m{self.layer}" if self.kind == "mlp" else self.kind

    @property
    def label(self) -> str:
        """The name for people: ``9.6``, ``MLP 3``, ``input``, ``logits``."""
        if self.kind == "head":
            return f"{self.layer}.{self.head}"
        return f"MLP {self.layer}" if self.kind == "mlp" else self.kind

    def __str__(self) -> str:
        return self.name


def component_nodes(n_layers: int, n_heads: int) -> tuple[Node, ...]:
    """All heads and MLPs, layer by layer, the heads of a layer before its MLP.

    >>> [node.name for node in component_nodes(n_layers=2, n_heads=2)]
    ['a0.h0', 'a0.h1', 'm0', 'a1.h0', 'a1.h1', 'm1']
    """
    return tuple(
        node
        for layer in range(n_layers)
        for node in (
            *(Node.attention_head(layer, head) for head in range(n_heads)),
            Node.mlp(layer),
        )
    )
