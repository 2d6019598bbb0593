"""Null, ceiling and floor: what an alignment is measured against."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from random_models import random_bridge, random_gpt2, random_llama

from circuitkd import load_model
from circuitkd.compare.alignment import (
    Alignment,
    argmax_score,
    same_sign,
    signed_transport_score,
    transport_score,
    weighted_argmax_alignment,
)
from circuitkd.compare.evidence import (
    Null,
    Reference,
    chance_similarity,
    random_floor,
    shuffled_null,
    split_half_ceiling,
)
from circuitkd.models import reinitialised

RNG = np.random.default_rng(0)
HEADS = ["head"] * 6
ALL = np.ones((6, 6), dtype=bool)


class TestNull:
    def test_right_influences_on_matched_components_beat_shuffled_ones(self) -> None:
        effect = -np.array([5.0, 3.0, 1.0, 0.1, 0.1, 0.1])
        null = shuffled_null(transport_score, effect, effect, np.eye(6), (HEADS, HEADS), draws=500)
        assert null.z > 1.5
        assert null.p < 0.05
        assert null.draws == 500

    def test_every_shuffle_of_two_components_is_known(self) -> None:
        """Shares 0.9, 0.1: half of all shuffles agree (alignment 1), half do not (0.2)."""
        effect = np.array([-9.0, -1.0])
        null = shuffled_null(
            transport_score, effect, effect, np.eye(2), (["head"] * 2, ["head"] * 2), draws=4000
        )
        assert null.mean == pytest.approx(0.6, abs=0.03)
        assert null.sd == pytest.approx(0.4, abs=0.01)
        assert null.z == pytest.approx(1, abs=0.1)
        assert null.p == pytest.approx(0.5, abs=0.03)

    def test_kinds_are_not_mixed(self) -> None:
        """One component of each kind: nothing can be shuffled, so the null is the value."""
        kinds = (["head", "mlp"], ["head", "mlp"])
        effect = np.array([-9.0, -1.0])
        null = shuffled_null(transport_score, effect, effect, np.eye(2), kinds, draws=50)
        assert (null.mean, null.sd, null.z, null.p) == (pytest.approx(1), 0, 0, 1)

    def test_p_is_uniform_where_influence_means_nothing(self) -> None:
        ps = []
        for _ in range(100):
            one, other = RNG.exponential(size=(2, 6))
            similarity = RNG.uniform(size=(6, 6))
            kinds = (HEADS, HEADS)
            found = shuffled_null(transport_score, one, other, similarity, kinds, draws=99)
            ps.append(found.p)
        assert 0.4 < np.mean(ps) < 0.6
        assert np.mean(np.array(ps) <= 0.1) < 0.2

    def test_the_same_seed_gives_the_same_null(self) -> None:
        one, other = RNG.exponential(size=(2, 6))
        first, again, different = (
            shuffled_null(
                transport_score, one, other, np.eye(6), (HEADS, HEADS), draws=30, seed=seed
            )
            for seed in (1, 1, 2)
        )
        assert first == again != different


class TestCeiling:
    def test_equal_prompts_cost_nothing(self) -> None:
        effects = np.tile([-3.0, -1.0, 0.5], (10, 1))
        ceiling = split_half_ceiling(transport_score, effects, np.eye(3))
        assert ceiling is not None
        assert (ceiling.value, ceiling.low) == (pytest.approx(1), pytest.approx(1))

    def test_it_is_the_overlap_of_the_halves_influences(self) -> None:
        """With dissimilar components it is Σ min(p, q); here by hand for every split of two."""
        effects = np.array([[-3.0, -1.0], [-1.0, -1.0]])
        ceiling = split_half_ceiling(transport_score, effects, np.eye(2), splits=7)
        assert ceiling is not None
        assert ceiling.draws == 7
        for number in (ceiling.value, ceiling.low, ceiling.high):
            assert number == pytest.approx(0.75)

    def test_more_prompts_lift_it(self) -> None:
        few, many = (
            split_half_ceiling(transport_score, RNG.normal(-1, 2, (n, 8)), np.eye(8))
            for n in (10, 1000)
        )
        assert few is not None
        assert many is not None
        assert few.value < many.value < 1

    def test_there_is_none_without_influence(self) -> None:
        assert split_half_ceiling(transport_score, np.zeros((4, 2)), np.eye(2)) is None


class TestFloor:
    def test_it_is_the_mean_over_random_students(self) -> None:
        teacher, student = np.array([-1.0, 0.0]), np.array([2.0, 0.0])
        tables = [np.full((2, 2), value) for value in (0.1, 0.3)]
        floor = random_floor(transport_score, teacher, [(student, table) for table in tables])
        assert floor is not None
        assert (floor.value, floor.low, floor.high) == pytest.approx((0.2, 0.1, 0.3))
        assert floor.draws == 2
        assert random_floor(transport_score, teacher, []) is None
        assert random_floor(transport_score, teacher, [(0 * student, tables[0])]) is None

    def test_chance_similarity_weighs_by_the_influence_that_moves(self) -> None:
        teacher, student = np.array([90.0, 10.0]), np.array([90.0, 10.0])
        table = np.diag([0.2, 0.6])
        assert chance_similarity(teacher, [(student, table)], 0.9) == pytest.approx(0.2)
        assert chance_similarity(teacher, [(student, table)], 0.95) == pytest.approx(0.6)
        assert chance_similarity(teacher, []) is None

    @pytest.mark.parametrize("make", [random_gpt2, random_llama])
    def test_a_random_student_has_the_shape_and_nothing_else(self, make) -> None:
        model = load_model(make(layers=2))
        one, again, other = (reinitialised(model, seed) for seed in (0, 0, 1))
        for name, weight in one.state_dict().items():
            assert weight.shape == model.state_dict()[name].shape
        assert (one.W_U == again.W_U).all()
        assert not (one.W_U == other.W_U).all()
        assert not (one.W_U == model.W_U).all()
        assert one.tokenizer is model.tokenizer

    def test_random_states_are_left_alone(self) -> None:
        import torch

        model = random_bridge("gpt2", layers=1)
        before = torch.random.get_rng_state()
        reinitialised(model, 3)
        assert torch.equal(before, torch.random.get_rng_state())


class TestCalibration:
    def test_floor_is_zero_and_ceiling_one(self) -> None:
        ends: Any = {"ceiling": Reference(0.9, 0.9, 0.9, 1), "floor": Reference(0.1, 0.1, 0.1, 1)}
        for value, expected in ((0.1, 0), (0.9, 1), (0.5, 0.5), (1.0, 1.125)):
            found = Alignment(value, value, value + 0.08, "transport", 10, **ends)
            assert found.calibrated == pytest.approx(expected)
            assert found.calibrated_interval == pytest.approx((expected, expected + 0.1))

    def test_there_is_none_without_both_ends_or_between_equal_ones(self) -> None:
        plain = Alignment(0.5, 0.4, 0.6, "transport", 10)
        assert (plain.calibrated, plain.calibrated_interval) == (None, None)
        end = Reference(0.3, 0.3, 0.3, 1)
        assert dataclasses.replace(plain, floor=end).calibrated is None
        assert dataclasses.replace(plain, floor=end, ceiling=end).calibrated is None

    def test_it_prints_its_evidence(self) -> None:
        found = Alignment(
            0.5,
            0.4,
            0.6,
            "transport",
            10,
            null=Null(0.3, 0.1, 2.0, 0.01, 99),
            ceiling=Reference(0.9, 0.8, 1.0, 20),
            floor=Reference(0.1, 0.0, 0.2, 5),
        )
        for word in ("0.500 [0.400, 0.600]", "z 2.0", "0.900 (0.800 to 1.000 of 20)",
                     "calibrated 0.500"):  # fmt: skip
            assert word in repr(found)


class TestOtherAlignments:
    def test_a_component_that_changed_its_sign_is_lost_to_the_signed_one(self) -> None:
        teacher, student = np.array([-3.0, -1.0]), np.array([-3.0, 1.0])
        assert transport_score(teacher, student, np.eye(2)) == pytest.approx(1)
        assert signed_transport_score(teacher, student, np.eye(2)) == pytest.approx(0.75)
        assert signed_transport_score(-teacher, -student, np.eye(2)) == pytest.approx(0.75)

    def test_equal_signs_change_nothing(self) -> None:
        teacher, student = -RNG.exponential(size=(2, 6))
        similarity = RNG.uniform(size=(6, 6))
        plain = transport_score(teacher, student, similarity)
        assert signed_transport_score(teacher, student, similarity) == pytest.approx(plain)

    def test_a_component_without_effect_has_no_sign(self) -> None:
        assert same_sign(np.array([0.0, -1.0]), np.array([0.0, 2.0])).tolist() == [
            [True, False],
            [False, False],
        ]

    def test_weighted_argmax_is_the_weighted_mean_of_best_similarities(self) -> None:
        p, q = RNG.dirichlet(np.ones(6)), RNG.dirichlet(np.ones(4))
        similarity = RNG.uniform(size=(6, 4))
        top, bottom = 0.0, 0.0
        for j in range(4):
            i = max(range(6), key=lambda i: similarity[i, j])
            top += (p[i] + q[j]) / 2 * similarity[i, j]
            bottom += (p[i] + q[j]) / 2
        found = weighted_argmax_alignment(p, q, similarity, np.ones((6, 4), dtype=bool))
        assert found == pytest.approx(top / bottom)

    @pytest.mark.parametrize("paper", [True, False])
    def test_scores_without_influence_do_not_exist(self, paper: bool) -> None:
        score = argmax_score(ALL, paper=paper)
        assert np.isnan(score(np.zeros(6), np.ones(6), np.eye(6)))
        assert np.isnan(score(np.ones(6), np.zeros(6), np.eye(6)))
        assert np.isnan(transport_score(np.zeros(6), np.ones(6), np.eye(6)))
        assert score(np.ones(6), np.ones(6), np.eye(6)) == pytest.approx(1)
