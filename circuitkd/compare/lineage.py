"""Matchings scored where the answer is known: does a student's component find its origin?

A student that keeps teacher layers knows its lineage: its layer l began as the teacher's layer
``layer_map[l]``, so that head h of the one is head h of the other. `lineage_accuracy` counts how
often a matching sends a component back there.

With π the matching's mass and o(j) the origin of student component j, j's score is the part of its
own mass that comes from home, π[o(j), j] / Σ_i π[i, j]: 0 or 1 for argmax and one-to-one, anything
between for transport. Scores are averaged over components, or weighted by the student's influence
shares q.

**How well a matching can do.** Argmax and one-to-one can always score 1. Transport moves mass until
both sides' influence is met, so a component whose influence grew must be fed by others, too: it
gets at most min(p_o, q_j) / q_j from home. That bound is ``attainable``. A matching that ignores
similarity, but not the kind, scores ``chance``: 1 / candidates for argmax, 1 / max(candidates,
students) for one-to-one, p_o / Σ_kind p for transport.

**When transport must score 1.** When the student computes the same with the same components, in
any order and with layers added that do nothing (p_o = q_j, S_oj = 1), staying at home has total
similarity 1, and any other plan has less unless two teacher components are perfectly alike. When
influences differ this is no longer so, even at S_oj = 1 for all j and even for the mass that could
stay: 1 − S is no metric, and two short moves (i to j while j's own mass goes on to k) may cost less
than one long one.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from circuitkd.compare._arrays import as_shares
from circuitkd.compare.matching import MATCHINGS, Plan, match
from circuitkd.errors import InputError
from circuitkd.nodes import Node

if TYPE_CHECKING:
    from circuitkd.compare.comparison import Comparison

LayerMap = Mapping[int, int] | Sequence[int]


def lineage_accuracy(
    comparison: "Comparison",
    layer_map: LayerMap,
    *,
    similarity: pd.DataFrame | None = None,
    matchings: Sequence[str] = MATCHINGS,
) -> pd.DataFrame:
    """How often each matching of a comparison sends a student component back to its origin.

    Args:
        comparison: of a teacher and a student that kept some of its layers.
        layer_map: for each student layer the teacher layer that it began as, as a list or as a
            mapping; layers that a mapping leaves out are of unknown origin and not scored.
        similarity: another similarity of the same components, teacher nodes × student nodes (as
            ``comparison.paper_similarity``); the comparison's own by default.
        matchings: ``argmax``, ``one-to-one``, ``transport``.

    Returns:
        One row for each matching and kind (``head``, ``mlp``, and ``all`` of both). Columns:
        matching, kind, n (student components scored), candidates (teacher components of the kind;
        missing for ``all``), accuracy, chance, attainable (averages over components), and
        weighted, weighted_chance, weighted_attainable (averages by the student's shares; NaN where
        the scored components have none). All between 0 and 1. For transport, components without
        influence have no mass to send and are left out.

    Raises:
        InputError: a layer that a model lacks, a layer whose heads do not correspond, or an unknown
            matching.

    >>> import circuitkd as ckd
    >>> twins = ckd.compare("tiny-teacher", "tiny-teacher", "numerals", n=8, draws=0)
    >>> found = lineage_accuracy(twins, [0, 1, 2, 3]).query("matching == 'transport'")
    >>> found[["kind", "n", "weighted"]].round(6).values.tolist()
    [['head', 32, 1.0], ['mlp', 4, 1.0], ['all', 36, 1.0]]
    """
    sides = [comparison.influences[side] for side in ("teacher", "student")]
    table = comparison.similarity if similarity is None else similarity
    return matching_lineage(
        sides[0].share(),
        sides[1].share(),
        table.to_numpy(),
        sides[0].nodes,
        sides[1].nodes,
        layer_map,
        matchings=matchings,
    )


def matching_lineage(
    teacher_share: Float[np.ndarray, "teacher"],
    student_share: Float[np.ndarray, "student"],
    similarity: Plan,
    teacher_nodes: Sequence[Node],
    student_nodes: Sequence[Node],
    layer_map: LayerMap | Mapping[Node, Node],
    *,
    matchings: Sequence[str] = MATCHINGS,
) -> pd.DataFrame:
    """`lineage_accuracy` of plain arrays; influences are scaled to sum 1 here.

    ``layer_map`` may also say it node by node, student node to teacher node, for a student whose
    heads were reordered.
    """
    home = origins(teacher_nodes, student_nodes, layer_map)
    kinds = _kinds(teacher_nodes)[:, None] == _kinds(student_nodes)[None, :]
    p = as_shares(teacher_share, "The teacher's influence")
    q = as_shares(student_share, "The student's influence")
    rows = []
    for method in matchings:
        # Argmax and one-to-one match components whatever their influence; mass would hide those
        # that have none.
        masses = (p, q) if method == "transport" else (np.ones_like(p), np.ones_like(q))
        plan = match(*masses, similarity, method, kinds)
        scores = _scores(plan, method, p, q, kinds, home)
        rows += [
            {"matching": method, "kind": kind, **_row(scores, q, kinds, inside, kind)}
            for kind, inside in _parts(student_nodes)
        ]
    return pd.DataFrame(rows).astype({"candidates": "Int64"})


def origins(
    teacher_nodes: Sequence[Node],
    student_nodes: Sequence[Node],
    layer_map: LayerMap | Mapping[Node, Node],
) -> Int[np.ndarray, "student"]:
    """For each student component the place of its origin among the teacher's, −1 where unknown."""
    place = {node: i for i, node in enumerate(teacher_nodes)}
    wanted = _node_map(student_nodes, layer_map)
    lost = [node for node in wanted.values() if node not in place]
    if lost:
        raise InputError(f"The lineage names {lost[0].name}, which the teacher does not have.")
    return np.array([place[wanted[node]] if node in wanted else -1 for node in student_nodes])


def _node_map(
    student_nodes: Sequence[Node], layer_map: LayerMap | Mapping[Node, Node]
) -> dict[Node, Node]:
    entries = layer_map.items() if isinstance(layer_map, Mapping) else enumerate(layer_map)
    layers: dict[int | None, int] = {}
    nodes: dict[Node, Node] = {}
    for key, origin in entries:
        if isinstance(key, Node) and isinstance(origin, Node):
            nodes[key] = origin
        elif isinstance(key, int) and isinstance(origin, int):
            layers[key] = origin
        else:
            raise InputError(f"A lineage maps layers or nodes to their origin, not {key!r}.")
    unknown = [
        *sorted(str(layer) for layer in layers.keys() - {node.layer for node in student_nodes}),
        *sorted(node.name for node in nodes.keys() - set(student_nodes)),
    ]
    if unknown or not (layers or nodes):
        named = unknown[0] if unknown else "no layer at all"
        raise InputError(f"The lineage must map layers of the student; it names {named}.")
    inherited = {
        node: Node(node.kind, layers[node.layer], node.head)
        for node in student_nodes
        if node.layer in layers
    }
    return inherited | nodes


def _scores(
    plan: Plan,
    method: str,
    p: Float[np.ndarray, "teacher"],
    q: Float[np.ndarray, "student"],
    kinds: Bool[np.ndarray, "teacher student"],
    home: Int[np.ndarray, "student"],
) -> dict[str, Float[np.ndarray, "student"]]:
    """Score, chance and best possible score of each student component, NaN where it has none."""
    columns = np.arange(len(home))
    known = home >= 0
    own, candidates = np.where(known, p[home], np.nan), kinds.sum(0)
    received = plan.sum(0)
    if method == "transport":
        known = known & (q > 0)
        chance = own / (p @ kinds)
        attainable = np.minimum(own, q) / np.where(q > 0, q, 1)
    else:
        students = np.array([(kinds[:, j] @ kinds > 0).sum() for j in columns])
        rivals = np.maximum(candidates, students if method == "one-to-one" else 0)
        chance, attainable = 1 / rivals, np.ones(len(home))
    part = np.divide(plan[home, columns], received, out=np.zeros(len(home)), where=received > 0)
    values = {"accuracy": part, "chance": chance, "attainable": attainable}
    return {name: np.where(known, value, np.nan) for name, value in values.items()}


def _row(
    scores: Mapping[str, Float[np.ndarray, "student"]],
    q: Float[np.ndarray, "student"],
    kinds: Bool[np.ndarray, "teacher student"],
    inside: Bool[np.ndarray, "student"],
    kind: str,
) -> dict[str, float | int | None]:
    scored = inside & np.isfinite(scores["accuracy"])
    weight = q[scored]
    row: dict[str, float | int | None] = {"n": int(scored.sum()), "candidates": None}
    if kind != "all" and inside.any():
        row["candidates"] = int(kinds[:, inside][:, 0].sum())
    for name, value in scores.items():
        row[name] = float(value[scored].mean()) if scored.any() else np.nan
    for name, value in scores.items():
        key = "weighted" if name == "accuracy" else f"weighted_{name}"
        total = weight.sum()
        row[key] = float(weight @ value[scored] / total) if total > 0 else np.nan
    return row


def _parts(nodes: Sequence[Node]) -> list[tuple[str, Bool[np.ndarray, "student"]]]:
    kinds = _kinds(nodes)
    return [("head", kinds == "head"), ("mlp", kinds == "mlp"), ("all", kinds != "")]


def _kinds(nodes: Sequence[Node]) -> np.ndarray:
    return np.array([node.kind for node in nodes])
