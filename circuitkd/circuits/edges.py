"""Edges of a model: which node's output reaches which part of which later node.

An edge goes from a sender (``input``, a head, an MLP) to a receiver: the query, key or value input
of a head, the input of an MLP, or the logits. Names are those of EAP-IG and MIB:
``a9.h9->logits``, ``input->a0.h0<q>``, ``a2.h1->m3``. Under grouped-query attention several query
heads share one key and one value, so keys and values are received by the group: ``a3.g1<k>`` is
the key input of group 1. With as many groups as query heads it is the head's own, ``a3.h1<k>``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformer_lens.model_bridge import TransformerBridge

from circuitkd.errors import InputError
from circuitkd.models import is_parallel
from circuitkd.nodes import Node, component_nodes

ReceiverKind = Literal["q", "k", "v", "mlp", "logits"]
ATTENTION_KINDS: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")

_KINDS: dict[str, ReceiverKind] = {"q": "q", "k": "k", "v": "v"}
_ATTENTION = re.compile(r"a(\d+)\.([hg])(\d+)<([qkv])>")
_MLP = re.compile(r"m(\d+)")


@dataclass(frozen=True)
class Receiver:
    """Where an edge ends. ``head`` is a query head, or a group where ``grouped``.

    >>> Receiver.parse("a3.g1<k>")
    Receiver(kind='k', layer=3, head=1, grouped=True)
    >>> Receiver.parse("a9.h6<q>").name, Receiver.parse("m3").label
    ('a9.h6<q>', 'MLP 3')
    """

    kind: ReceiverKind
    layer: int | None = None
    head: int | None = None
    grouped: bool = False

    def __post_init__(self) -> None:
        has = (self.layer is not None, self.head is not None)
        wanted = {"mlp": (True, False), "logits": (False, False)}.get(self.kind, (True, True))
        if has != wanted or (self.grouped and self.kind not in ("k", "v")):
            raise InputError(
                f"A receiver of kind {self.kind!r} cannot have layer={self.layer}, "
                f"head={self.head}, grouped={self.grouped}."
            )

    @classmethod
    def parse(cls, name: str) -> "Receiver":
        """The receiver called ``name``; ``InputError`` where it is not a receiver's name."""
        if match := _ATTENTION.fullmatch(name):
            return cls(_KINDS[match[4]], int(match[1]), int(match[3]), grouped=match[2] == "g")
        if match := _MLP.fullmatch(name):
            return cls("mlp", int(match[1]))
        if name == "logits":
            return cls("logits")
        raise InputError(
            f"{name!r} is not a receiver. Receivers are called a<layer>.h<head><q> (or <k>, <v>), "
            "a<layer>.g<group><k>, m<layer>, logits."
        )

    @property
    def name(self) -> str:
        """The name in files: ``a9.h6<q>``, ``a3.g1<k>``, ``m3``, ``logits``."""
        if self.kind == "logits":
            return "logits"
        if self.kind == "mlp":
            return f"m{self.layer}"
        return f"a{self.layer}.{'g' if self.grouped else 'h'}{self.head}<{self.kind}>"

    @property
    def label(self) -> str:
        """The name for people: ``9.6 q``, ``3.group 1 k``, ``MLP 3``, ``logits``."""
        if self.kind == "logits":
            return "logits"
        if self.kind == "mlp":
            return f"MLP {self.layer}"
        return f"{self.layer}.{'group ' if self.grouped else ''}{self.head} {self.kind}"

    @property
    def is_attention(self) -> bool:
        """Whether this is a query, key or value input."""
        return self.kind in ATTENTION_KINDS

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Edge:
    """From a sender's output to a receiver's input.

    >>> edge = Edge.parse("a9.h9->logits")
    >>> edge.sender, edge.receiver.kind
    (Node(kind='head', layer=9, head=9), 'logits')
    """

    sender: Node
    receiver: Receiver

    def __post_init__(self) -> None:
        if not _reaches(self.sender, self.receiver):
            raise InputError(
                f"{self.sender.name} cannot send to {self.receiver.name}: a receiver reads what "
                "was computed before it."
            )

    @classmethod
    def parse(cls, name: str) -> "Edge":
        """The edge called ``name``; ``InputError`` where it is not an edge's name."""
        sender, arrow, receiver = name.partition("->")
        if not arrow:
            raise InputError(f"{name!r} is not an edge: write sender->receiver, as a9.h9->logits.")
        return cls(Node.parse(sender), Receiver.parse(receiver))

    @property
    def name(self) -> str:
        """The name in files: ``a9.h9->logits``."""
        return f"{self.sender.name}->{self.receiver.name}"

    @property
    def label(self) -> str:
        """The name for people: ``9.9 → logits``."""
        return f"{self.sender.label} → {self.receiver.label}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Layout:
    """What decides which edges a model has.

    >>> gpt2_small = Layout(n_layers=12, n_heads=12, n_kv_heads=12)
    >>> len(gpt2_small.nodes), len(gpt2_small.edges)
    (158, 32491)
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    parallel_attn_mlp: bool = False
    """Attention and MLP run side by side: a layer's heads do not reach its MLP."""

    def __post_init__(self) -> None:
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise InputError(
                f"{self.n_heads} heads cannot share {self.n_kv_heads} keys and values evenly."
            )

    @cached_property
    def senders(self) -> tuple[Node, ...]:
        """The input, then all heads and MLPs, in order of computation."""
        return (Node("input"), *component_nodes(self.n_layers, self.n_heads))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All senders, and the logits."""
        return (*self.senders, Node("logits"))

    @cached_property
    def receivers(self) -> tuple[Receiver, ...]:
        """In order of computation; in a layer all queries, keys, values, then the MLP."""
        layers = range(self.n_layers)
        return (
            *(r for layer in layers for r in self.layer_receivers(layer)),
            Receiver("logits"),
        )

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, by receiver, the senders of each in order of computation."""
        return tuple(
            Edge(sender, receiver)
            for receiver in self.receivers
            for sender in self.senders[: self.n_before(receiver)]
        )

    def attention_receivers(self, layer: int) -> tuple[Receiver, ...]:
        """The queries, keys and values of a layer."""
        grouped = self.n_kv_heads != self.n_heads
        return (
            *(Receiver("q", layer, head) for head in range(self.n_heads)),
            *(Receiver("k", layer, group, grouped) for group in range(self.n_kv_heads)),
            *(Receiver("v", layer, group, grouped) for group in range(self.n_kv_heads)),
        )

    def layer_receivers(self, layer: int) -> tuple[Receiver, ...]:
        """The queries, keys and values of a layer, then its MLP."""
        return (*self.attention_receivers(layer), Receiver("mlp", layer))

    def n_before(self, receiver: Receiver) -> int:
        """How many senders the receiver reads: the first so many of ``senders``."""
        if receiver.layer is None:
            return len(self.senders)
        earlier = 1 + receiver.layer * (self.n_heads + 1)
        reads_heads = receiver.kind == "mlp" and not self.parallel_attn_mlp
        return earlier + (self.n_heads if reads_heads else 0)

    def position(self, sender: Node) -> int:
        """The place of a sender in ``senders``."""
        if sender.layer is None:
            return 0
        head = self.n_heads if sender.head is None else sender.head
        return 1 + sender.layer * (self.n_heads + 1) + head

    def query_heads(self, receiver: Receiver) -> slice:
        """The query heads whose output a query, key or value input changes."""
        if receiver.head is None:
            raise InputError(f"{receiver.name} is not the input of a head.")
        if receiver.kind == "q":
            return slice(receiver.head, receiver.head + 1)
        size = self.n_heads // self.n_kv_heads
        return slice(receiver.head * size, (receiver.head + 1) * size)

    def require(self, edges: Iterable[Edge]) -> None:
        """``InputError`` where an edge is not one of this model's."""
        senders, receivers = set(self.senders), set(self.receivers)
        for edge in edges:
            if edge.sender not in senders:
                raise InputError(f"The model has no node {edge.sender.name}.")
            if edge.receiver not in receivers:
                raise InputError(f"The model has no receiver {edge.receiver.name}.{self._hint()}")
            if self.position(edge.sender) >= self.n_before(edge.receiver):
                raise InputError(
                    f"The model has no edge {edge.name}: its attention and MLP run in parallel."
                )

    def _hint(self) -> str:
        if self.n_kv_heads == self.n_heads:
            return ""
        return (
            f" Its {self.n_heads} query heads a layer share {self.n_kv_heads} keys and values, "
            "which are called a<layer>.g<group><k> and a<layer>.g<group><v>."
        )


def layout_of(model: TransformerBridge) -> Layout:
    """The layout of a loaded model."""
    groups = getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads
    return Layout(model.cfg.n_layers, model.cfg.n_heads, groups, is_parallel(model))


def edges_of(model: TransformerBridge) -> tuple[Edge, ...]:
    """All edges of a model, by receiver in order of computation.

    >>> import circuitkd as ckd
    >>> edges_of(ckd.load_model("tiny-student"))[0].name
    'input->a0.h0<q>'
    """
    return layout_of(model).edges


def _reaches(sender: Node, receiver: Receiver) -> bool:
    if sender.kind == "logits":
        return False
    if sender.layer is None or receiver.layer is None:
        return True
    if receiver.kind == "mlp" and sender.kind == "head":
        return sender.layer <= receiver.layer
    return sender.layer < receiver.layer
