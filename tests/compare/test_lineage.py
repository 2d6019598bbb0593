"""Matchings scored by known origins: by hand, at chance, and where the answer must be 100 %."""

import copy
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compare.synthetic import compare_networks, gpt2_of_heads, permuted_heads
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import GPT2LMHeadModel

from circuitkd.compare.lineage import lineage_accuracy, matching_lineage, origins
from circuitkd.compare.matching import MATCHINGS, match
from circuitkd.errors import InputError
from circuitkd.nodes import Node, component_nodes

HEADS = tuple(Node.attention_head(layer, 0) for layer in range(3))


def row(frame: pd.DataFrame, matching: str, kind: str = "all") -> pd.Series:
    return frame[(frame.matching == matching) & (frame.kind == kind)].iloc[0]


# By hand


def test_argmax_and_one_to_one_by_hand() -> None:
    # Teacher heads A, B, C; the student's two came from A and C. Both look most like A.
    s = np.array([[0.9, 0.8], [0.1, 0.2], [0.3, 0.7]])
    found = matching_lineage(
        np.array([0.2, 0.5, 0.3]), np.array([0.75, 0.25]), s, HEADS, HEADS[:2], [0, 2]
    )
    argmax, assigned = row(found, "argmax", "head"), row(found, "one-to-one", "head")
    assert (argmax.accuracy, argmax.weighted) == (0.5, 0.75)
    assert (assigned.accuracy, assigned.weighted) == (1, 1)
    for scored in (argmax, assigned):
        assert (scored.n, scored.candidates) == (2, 3)
        assert scored.chance == scored.weighted_chance == pytest.approx(1 / 3)
        assert scored.attainable == scored.weighted_attainable == 1


def test_transport_is_scored_by_mass() -> None:
    # The first head has grown from 0.2 to 0.5: home can feed it 0.2, the rest comes from elsewhere.
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.5])
    s = np.array([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]])
    found = row(matching_lineage(p, q, s, HEADS, HEADS[:2], [0, 2]), "transport", "head")
    assert found.accuracy == pytest.approx((0.4 + 1) / 2)
    assert found.weighted == pytest.approx(0.2 + 0.5)
    assert found.attainable == pytest.approx(found.accuracy)
    assert found.weighted_attainable == pytest.approx(found.weighted)
    assert found.chance == pytest.approx((0.2 + 0.5) / 2)
    assert found.weighted_chance == pytest.approx(0.5 * 0.2 + 0.5 * 0.5)


def test_heads_and_mlps_are_counted_apart_and_together() -> None:
    nodes = component_nodes(2, 1)  # a0.h0, m0, a1.h0, m1
    s = np.eye(4)
    s[:, 3] = [0, 1, 0, 0.5]  # MLP 1 looks like MLP 0
    found = matching_lineage(np.ones(4), np.array([1.0, 2, 3, 2]), s, nodes, nodes, [0, 1])
    heads, mlps, both = (row(found, "argmax", kind) for kind in ("head", "mlp", "all"))
    assert (heads.accuracy, mlps.accuracy, both.accuracy) == (1, 0.5, 0.75)
    assert (heads.weighted, mlps.weighted, both.weighted) == (1, 0.5, 0.75)
    assert (heads.candidates, mlps.candidates) == (2, 2)
    assert (both.n, both.chance) == (4, 0.5)
    assert pd.isna(both.candidates)


def test_chance_of_transport_knows_kinds_but_not_similarity() -> None:
    nodes = component_nodes(2, 1)  # half of the teacher's influence is in its MLPs, 3 : 1
    p, q = np.array([1.0, 3, 3, 1]), np.array([1.0, 1, 1, 1])
    found = matching_lineage(p, q, np.eye(4), nodes, nodes, [0, 1])
    assert row(found, "transport", "head").chance == pytest.approx((1 / 4 + 3 / 4) / 2)
    one = matching_lineage(p, np.array([1.0, 0, 0, 0]), np.eye(4), nodes, nodes, [0, 1])
    assert row(one, "transport").chance == pytest.approx(1 / 4)
    assert row(one, "transport").attainable == pytest.approx(1 / 8)


def test_influences_are_scaled() -> None:
    p, q, s = np.array([2.0, 3, 5]), np.array([5.0, 5]), np.eye(3, 2)
    found = [
        matching_lineage(p * a, q * b, s, HEADS, HEADS[:2], [0, 2]) for a, b in ((1, 1), (0.1, 7))
    ]
    pd.testing.assert_frame_equal(found[0], found[1])


def test_layers_of_unknown_origin_are_not_scored() -> None:
    s = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    found = row(
        matching_lineage(np.ones(3), np.ones(2), s, HEADS, HEADS[:2], {1: 2}), "argmax", "head"
    )
    assert (found.n, found.accuracy) == (1, 1)
    np.testing.assert_array_equal(origins(HEADS, HEADS[:2], {1: 2}), [-1, 2])


def test_components_without_influence_have_no_mass_to_send() -> None:
    found = matching_lineage(
        np.array([0.5, 0.5, 0.0]), np.array([1.0, 0.0]), np.eye(3, 2), HEADS, HEADS[:2], [0, 1]
    )
    assert (row(found, "argmax").n, row(found, "argmax").accuracy) == (2, 1)
    moved = row(found, "transport")
    assert (moved.n, moved.accuracy, moved.weighted) == (1, 0.5, 0.5)


def test_only_the_matchings_asked_for_are_scored() -> None:
    found = matching_lineage(
        np.ones(3), np.ones(3), np.eye(3), HEADS, HEADS, [0, 1, 2], matchings=["transport"]
    )
    assert set(found.matching) == {"transport"}


# Chance and what is possible


def test_chance_is_what_meaningless_similarities_reach() -> None:
    rng = np.random.default_rng(0)
    teachers, students = component_nodes(2, 3), component_nodes(4, 3)
    found = []
    for _ in range(400):
        p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(16))
        s = rng.uniform(size=(8, 16))
        frame = matching_lineage(
            p, q, s, teachers, students, [0, 1, 0, 1], matchings=["argmax", "one-to-one"]
        )
        found.append(frame[frame.kind == "head"].set_index("matching"))
    for matching, expected in (("argmax", 1 / 6), ("one-to-one", 1 / 12)):
        values = [frame.accuracy[matching] for frame in found]
        assert found[0].chance[matching] == pytest.approx(expected)
        assert np.mean(values) == pytest.approx(expected, abs=0.015)


share = arrays(float, 3, elements=st.floats(0.01, 1))


@given(share, share, arrays(float, (3, 3), elements=st.floats(0, 1)))
def test_transport_never_beats_what_is_attainable(p, q, s) -> None:
    p, q = p / p.sum(), q / q.sum()
    found = matching_lineage(p, q, s, HEADS, HEADS, [0, 1, 2], matchings=["transport"])
    for frame in (row(found, "transport"), row(found, "transport", "head")):
        assert frame.accuracy <= frame.attainable + 1e-9 <= 1 + 2e-9
        assert frame.weighted <= frame.weighted_attainable + 1e-9


@given(share, arrays(float, (3, 3), elements=st.floats(0, 0.999)))
def test_equal_shares_and_perfect_similarity_send_everything_home(p, s) -> None:
    p = p / p.sum()
    np.fill_diagonal(s, 1)
    found = matching_lineage(p, p, s, HEADS, HEADS, [0, 1, 2])
    np.testing.assert_allclose(found.query("kind != 'mlp'").accuracy, 1, atol=1e-9)


def test_perfect_similarity_alone_does_not_keep_mass_at_home() -> None:
    # cos² of directions at 0, 30 and 60 degrees. The first lost what the last won; two short moves
    # cost less (2 · 0.25 · ½) than one long one (0.75 · ½), so the middle one's mass moves on.
    angles = np.deg2rad([0, 30, 60])
    s = np.cos(angles[:, None] - angles[None, :]) ** 2
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])
    found = row(matching_lineage(p, q, s, HEADS, HEADS, [0, 1, 2]), "transport")
    assert found.weighted == pytest.approx(0)
    assert found.weighted_attainable == pytest.approx(0.5)
    np.testing.assert_allclose(match(p, q, s), [[0, 0.5, 0], [0, 0, 0.5], [0, 0, 0]])


# Undamaged copies


def with_idle_layer(network: GPT2LMHeadModel, before: int) -> GPT2LMHeadModel:
    """The same function: a new layer, another one's copy, whose head outputs and MLP are zero."""
    network = copy.deepcopy(network)
    blocks: Any = network.transformer.h
    idle = copy.deepcopy(blocks[before])
    for name, parameter in idle.named_parameters():
        if "c_proj" in name:
            parameter.data.zero_()
    blocks.insert(before, idle)
    network.config.n_layer += 1
    for layer, block in enumerate(blocks):
        block.attn.layer_idx = layer
    return network


def first_layers(network: GPT2LMHeadModel, layers: int) -> GPT2LMHeadModel:
    network = copy.deepcopy(network)
    network.transformer.h = network.transformer.h[:layers]
    network.config.n_layer = layers
    return network


def assert_all_home(frame: pd.DataFrame) -> None:
    for name in ("accuracy", "weighted"):
        np.testing.assert_allclose(frame[name], 1, atol=1e-5, err_msg=name)


def test_a_model_is_its_own_origin() -> None:
    network = gpt2_of_heads()
    found = lineage_accuracy(compare_networks(network, network, draws=0), [0, 1, 2])
    assert_all_home(found)
    assert list(found.n) == [12, 3, 15] * 3


def test_heads_in_another_order_find_their_origin() -> None:
    network, order = gpt2_of_heads(), [2, 0, 3, 1]
    result = compare_networks(network, permuted_heads(network, 1, order), draws=0)
    sides = result.influences["teacher"], result.influences["student"]
    home = {node: node for node in sides[0].nodes}
    home |= {Node.attention_head(1, k): Node.attention_head(1, old) for k, old in enumerate(order)}
    shares = [side.share() for side in sides]
    nodes = [side.nodes for side in sides]
    table = result.similarity.to_numpy()
    assert_all_home(matching_lineage(shares[0], shares[1], table, nodes[0], nodes[1], home))
    by_layer = lineage_accuracy(result, [0, 1, 2])
    assert row(by_layer, "transport", "head").accuracy == pytest.approx(8 / 12)


def test_layers_that_do_nothing_mislead_nobody() -> None:
    network = gpt2_of_heads(layers=2)
    longer = with_idle_layer(network, before=1)
    added = lineage_accuracy(compare_networks(network, longer, draws=0), {0: 0, 2: 1})
    assert_all_home(added)
    assert list(added.n) == [8, 2, 10] * 3
    dropped = lineage_accuracy(compare_networks(longer, network, draws=0), [0, 2])
    assert_all_home(dropped)


def test_kept_first_layers_are_perfectly_alike_and_go_home_as_far_as_influence_allows() -> None:
    network = gpt2_of_heads()
    result = compare_networks(network, first_layers(network, 2), draws=0)
    own = [result.similarity.loc[name, name] for name in result.similarity.columns]
    np.testing.assert_allclose(own, 1, atol=1e-6)
    found = lineage_accuracy(result, [0, 1])
    assert_all_home(found.query("matching != 'transport'"))
    moved = row(found, "transport")
    assert moved.weighted == pytest.approx(moved.weighted_attainable, abs=1e-6)
    assert moved.weighted < 0.95


def test_layers_after_a_dropped_one_may_be_mistaken() -> None:
    network = gpt2_of_heads()
    result = compare_networks(network, first_layers(network, 2), draws=0)
    wrong = lineage_accuracy(result, [0, 2])  # the student's layer 1 is the teacher's layer 1
    assert row(wrong, "argmax").accuracy == pytest.approx(0.5)


# Comparisons


def test_another_similarity_may_be_scored() -> None:
    network = gpt2_of_heads()
    result = compare_networks(network, network, draws=0)
    blind = pd.DataFrame(
        np.zeros(result.similarity.shape),
        index=result.similarity.index,
        columns=result.similarity.columns,
    )
    found = lineage_accuracy(result, [0, 1, 2], similarity=blind, matchings=["argmax"])
    assert row(found, "argmax", "mlp").accuracy == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("layer_map", "message"),
    [
        ([0, 5], "a5.h0, which the teacher does not have"),
        ([0, 1, 2], "it names 2"),
        ({4: 0}, "it names 4"),
        ([], "no layer at all"),
        ({HEADS[2]: HEADS[0]}, "it names a2.h0"),
    ],
)
def test_wrong_lineages_are_refused(layer_map, message) -> None:
    with pytest.raises(InputError, match=message):
        matching_lineage(np.ones(3), np.ones(2), np.ones((3, 2)), HEADS, HEADS[:2], layer_map)


def test_every_matching_is_scored_by_default() -> None:
    found = matching_lineage(np.ones(3), np.ones(3), np.eye(3), HEADS, HEADS, [0, 1, 2])
    assert tuple(found.matching.unique()) == MATCHINGS
