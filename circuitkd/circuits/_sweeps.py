"""The greedy procedure that prunes nodes, as pure logic: a scorer in, decisions out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from circuitkd.errors import InputError
from circuitkd.nodes import Node

Scorer = Callable[[frozenset[Node]], float]
"""Kept nodes -> what they retain of the full model's metric, in percent."""

ORDERS = ("published", "forward-first")
RELATIVE_TO = ("full", "circuit")


@dataclass(frozen=True)
class Decision:
    """One candidate: what the circuit retains without it, and whether it was removed for good."""

    sweep: int
    node: Node
    retained_pct: float
    removed: bool


@dataclass(frozen=True)
class Pruned:
    """What is left, and every decision that led there."""

    kept: frozenset[Node]
    decisions: tuple[Decision, ...]
    sweeps: int

    @property
    def last_sweep(self) -> tuple[Decision, ...]:
        """The sweep that removed nothing: each kept node, left out of the final circuit alone."""
        return tuple(decision for decision in self.decisions if decision.sweep == self.sweeps)


def greedy_sweeps(
    nodes: Sequence[Node],
    retained: Scorer,
    threshold: float,
    *,
    order: str | Sequence[Node] = "published",
    relative_to: str = "full",
    on_candidate: Callable[[int, int, int], None] | None = None,
) -> Pruned:
    """Remove nodes one at a time, in alternating sweeps, until a whole sweep removes none.

    A candidate goes, at once, where what is left without it is still good enough:

    - ``relative_to="full"`` (published): 100 - retained < 100 · threshold. This is one budget for
      all removals together, against the full model.
    - ``relative_to="circuit"``: its removal costs less than ``threshold`` of what the circuit
      retained before it. Small losses can add up without a limit.

    Orders: ``"published"`` begins with a backward sweep (last layer to first; in a layer the MLP,
    then its heads from 0 on), then a forward sweep (first layer to last; in a layer the heads from
    0 on, then the MLP), and so on. ``"forward-first"`` begins with the forward one. A sequence of
    nodes is the order of the first sweep; every second sweep goes through it in reverse.

    Args:
        nodes: all candidates, layer by layer, heads before the MLP.
        retained: the scorer; it is called once a candidate.
        threshold: a share, in [0, 1].
        order: see above.
        relative_to: see above.
        on_candidate: called as ``(sweep from 1, done, total)`` before each candidate.
    """
    _validate(nodes, threshold, order, relative_to)
    kept, current, decisions = frozenset(nodes), 100.0, []
    for sweep, ordered in enumerate(_orders(nodes, order), start=1):
        candidates = [node for node in ordered if node in kept]
        before = kept
        for done, node in enumerate(candidates):
            if on_candidate is not None:
                on_candidate(sweep, done, len(candidates))
            left = retained(kept - {node})
            if relative_to == "full":
                removed = 100 - left < 100 * threshold
            else:
                removed = current - left < threshold * abs(current)
            if removed:
                kept, current = kept - {node}, left
            decisions.append(Decision(sweep, node, left, removed))
        if kept == before:
            return Pruned(kept, tuple(decisions), sweep)
    raise AssertionError("the orders never end")


def _orders(nodes: Sequence[Node], order: str | Sequence[Node]) -> Iterator[Sequence[Node]]:
    if isinstance(order, str):
        first, second = _backward(nodes), list(nodes)
        if order == "forward-first":
            first, second = second, first
    else:
        first, second = list(order), list(reversed(order))
    while True:
        yield first
        yield second


def _backward(nodes: Iterable[Node]) -> list[Node]:
    """Last layer first; in a layer the MLP, then the heads in ascending order."""
    return sorted(nodes, key=lambda node: (-(node.layer or 0), node.kind == "head", node.head or 0))


def _validate(
    nodes: Sequence[Node], threshold: float, order: str | Sequence[Node], relative_to: str
) -> None:
    check_threshold(threshold)
    if relative_to not in RELATIVE_TO:
        raise InputError(
            f"A threshold is relative to {' or '.join(RELATIVE_TO)}, not to {relative_to!r}."
        )
    if isinstance(order, str):
        if order not in ORDERS:
            raise InputError(f"Unknown order {order!r}: {', '.join(ORDERS)}, or a list of nodes.")
    elif len(order) != len(set(order)) or set(order) != set(nodes):
        raise InputError("An order must name every head and MLP of the model exactly once.")


def check_threshold(threshold: float) -> None:
    """``InputError`` unless it is a share."""
    if not 0 <= threshold <= 1:
        raise InputError(f"A threshold is a share between 0 and 1, not {threshold}.")
