"""Matchings against brute force and a general solver; merges, splits and drops from known plans."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from circuitkd.compare.matching import match, matches_frame, restructuring
from circuitkd.errors import InputError
from circuitkd.nodes import Node, component_nodes

DATA = Path(__file__).parent.parent / "data"
HEADS = tuple(Node.attention_head(0, k) for k in range(4))


def random_case(seed: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(rows)), rng.dirichlet(np.ones(columns))
    return p, q, rng.uniform(size=(rows, columns))


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5), (5, 3)])
def test_one_to_one_is_the_best_of_all_assignments(rows: int, columns: int) -> None:
    p, q, s = random_case(0, rows, columns)
    plan = match(p, q, s, "one-to-one")
    taller = s if rows >= columns else s.T
    small = taller.shape[1]
    best = max(
        sum(taller[chosen[j], j] for j in range(small))
        for chosen in permutations(range(len(taller)), small)
    )
    assert s[plan > 0].sum() == pytest.approx(best)
    assert (plan > 0).sum(0).max() <= 1
    assert (plan > 0).sum(1).max() <= 1
    i, j = np.argwhere(plan > 0)[0]
    assert plan[i, j] == pytest.approx(min(p[i], q[j]))


@pytest.mark.parametrize("seed", range(5))
def test_transport_is_optimal(seed: int) -> None:
    p, q, s = random_case(seed, 4, 3)
    plan = match(p, q, s, "transport")
    marginals = np.concatenate([np.kron(np.eye(4), np.ones(3)), np.kron(np.ones(4), np.eye(3))])
    best = linprog(-s.ravel(), A_eq=marginals, b_eq=np.concatenate([p, q]))
    assert (plan * s).sum() == pytest.approx(-best.fun, abs=1e-9)
    np.testing.assert_allclose(plan.sum(1), p, atol=1e-12)
    np.testing.assert_allclose(plan.sum(0), q, atol=1e-12)


def test_argmax_gives_every_student_component_its_best_teacher() -> None:
    s = np.array([[0.9, 0.8, 0.1], [0.2, 0.7, 0.3]])
    plan = match([1, 1], [2, 1, 1], s, "argmax")
    np.testing.assert_allclose(plan, [[0.5, 0.25, 0], [0, 0, 0.25]])


def test_argmax_and_one_to_one_keep_heads_to_heads() -> None:
    s = np.array([[0.0, 0.0], [0.0, 0.0]])
    same = np.array([[False, False], [True, False]])
    for method in ("argmax", "one-to-one"):
        plan = match([1, 1], [1, 1], s, method, same)
        assert plan.tolist() == [[0, 0], [0.5, 0]], method


@pytest.mark.parametrize(
    ("p", "q", "s", "method", "message"),
    [
        ([1], [1], [[1.0]], "greedy", "choose one of argmax, one-to-one, transport"),
        ([1, 1], [1], [[1.0]], "transport", "must be 2 × 1"),
        ([0, 0], [1], [[1.0], [1.0]], "transport", "teacher's influence: no component has any"),
        ([1], [0.0], [[1.0]], "transport", "student's influence: no component has any"),
        ([-1, 2], [1], [[1.0], [1.0]], "transport", "not negative"),
        ([np.nan], [1], [[1.0]], "transport", "finite"),
        ([1], [1], [[1.2]], "transport", "between 0 and 1"),
        ([1], [1], [[np.nan]], "transport", "NaN"),
    ],
)
def test_wrong_input_is_refused_in_words(p, q, s, method, message) -> None:
    with pytest.raises(InputError, match=message):
        match(p, q, s, method)


def test_two_teacher_heads_into_one_are_a_merge() -> None:
    plan = np.array([[0.3, 0.0], [0.2, 0.0], [0.0, 0.5]])
    s = np.array([[0.9, 0.1], [0.6, 0.1], [0.1, 0.8]])
    found = restructuring(plan, s, HEADS[:3], HEADS[:2])
    [merge] = found.merges.to_dict("records")
    assert merge["student"] == "a0.h0"
    assert merge["teachers"] == ("a0.h0", "a0.h1")
    assert merge["mass"] == pytest.approx(0.5)
    assert merge["similarity"] == pytest.approx((0.3 * 0.9 + 0.2 * 0.6) / 0.5)
    assert len(found.splits) == 0
    assert len(found.drops) == 0
    assert repr(found) == "merges: a0.h0, a0.h1 → a0.h0\nsplits: none\ndrops: none"


def test_the_transposed_plan_is_a_split() -> None:
    plan = np.array([[0.3, 0.2, 0.0], [0.0, 0.0, 0.5]])
    found = restructuring(plan, np.full((2, 3), 0.9), HEADS[:2], HEADS[:3])
    [split] = found.splits.to_dict("records")
    assert split["teacher"] == "a0.h0"
    assert split["students"] == ("a0.h0", "a0.h1")
    assert len(found.merges) == 0


def test_mass_moved_at_low_similarity_is_a_drop() -> None:
    plan = np.array([[0.5, 0.1], [0.0, 0.4]])
    s = np.array([[0.9, 0.1], [0.0, 0.2]])
    found = restructuring(plan, s, HEADS[:2], HEADS[:2])
    assert found.drops["teacher"].tolist() == ["a0.h1", "a0.h0"]
    np.testing.assert_allclose(found.drops["share"], [0.4, 0.6])
    np.testing.assert_allclose(found.drops["lost"], [0.4, 0.1])
    np.testing.assert_allclose(found.drops["lost_fraction"], [1, 1 / 6])
    assert found.lost == pytest.approx(0.5)
    assert len(restructuring(plan, s, HEADS[:2], HEADS[:2], threshold=0.15).drops) == 1


def test_crumbs_are_no_merge_and_no_drop() -> None:
    plan = np.array([[0.9, 0.0], [0.05, 0.0], [0.0, 0.045], [0.0, 0.005]])
    s = np.array([[0.9, 0.9], [0.9, 0.9], [0.9, 0.9], [0.1, 0.1]])
    found = restructuring(plan, s, HEADS, HEADS[:2])
    assert len(found.merges) == 0
    assert len(found.drops) == 0
    assert len(restructuring(plan, s, HEADS, HEADS[:2], part=0.01).merges) == 1
    assert len(restructuring(plan, s, HEADS, HEADS[:2], least=0.001).drops) == 1


def test_unlike_partners_are_no_merge() -> None:
    plan = np.array([[0.5], [0.5]])
    found = restructuring(plan, np.array([[0.9], [0.1]]), HEADS[:2], HEADS[:1])
    assert len(found.merges) == 0
    assert found.drops["teacher"].tolist() == ["a0.h1"]


def test_thresholds_outside_zero_to_one_are_refused() -> None:
    with pytest.raises(InputError, match="threshold must lie between 0 and 1"):
        restructuring(np.ones((1, 1)), np.ones((1, 1)), HEADS[:1], HEADS[:1], threshold=25.0)


def test_matches_are_listed_by_mass() -> None:
    nodes = component_nodes(1, 1)
    plan = np.array([[0.2, 0.1], [0.0, 0.7]])
    frame = matches_frame(
        plan, np.array([[0.5, 0.0], [0.0, 0.8]]), plan.sum(1), plan.sum(0), nodes, nodes
    )
    assert frame["teacher"].tolist() == ["m0", "a0.h0", "a0.h0"]
    assert frame["student"].tolist() == ["m0", "a0.h0", "m0"]
    assert frame["kind"].tolist() == ["mlp", "head", "head→mlp"]
    np.testing.assert_allclose(frame["mass"], [0.7, 0.2, 0.1])
    np.testing.assert_allclose(frame["similarity"], [0.8, 0.5, 0.0])
    np.testing.assert_allclose(frame["teacher_share"], [0.7, 0.3, 0.3])
    np.testing.assert_allclose(frame["student_share"], [0.8, 0.2, 0.8])


def test_the_published_merge_of_gpt2s_mlps() -> None:
    """MLPs 9 and 10 of GPT-2 go into MLP 4 of DistilGPT2, by the similarities that were recorded.

    Influences were not recorded for MLPs alone: all count alike here. Pairs that nobody measured
    have 0.
    """
    cosines = json.loads((DATA / "gpt2_mlp_token_cosines.json").read_text())["cosines"]
    s = np.zeros((5, 3))
    for pair, value in cosines.items():
        teacher, student = map(int, pair.split(","))
        s[teacher - 7, student - 3] = value
    nodes = [tuple(Node("mlp", layer, None) for layer in layers) for layers in ((7, 8, 9, 10, 11),
             (3, 4, 5))]  # fmt: skip
    plan = match(np.full(5, 0.2), np.full(3, 1 / 3), s)
    found = restructuring(plan, s, *nodes)
    merged = dict(zip(found.merges["student"], found.merges["teachers"], strict=True))
    assert {"m9", "m10"} <= set(merged["m4"])
    alone = match(np.full(5, 0.2), np.full(3, 1 / 3), s, "argmax")
    assert (alone[:, 1] > 0).sum() == 1  # a matching that takes one teacher each cannot see it
