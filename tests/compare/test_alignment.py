"""The alignment numbers: the paper's recorded score, and what transport charges for."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from circuitkd.compare.alignment import (
    argmax_paper_alignment,
    bootstrap_scores,
    paper_alignment,
    transport_alignment,
    transport_score,
    with_interval,
)
from circuitkd.errors import InputError

GOLDEN = Path(__file__).parents[1] / "data" / "alignment_ioi.json"


def golden_pairs() -> np.ndarray:
    return np.array(json.loads(GOLDEN.read_text())["pairs"])


def test_the_papers_recorded_pairs_give_its_printed_score() -> None:
    assert paper_alignment(golden_pairs()) == pytest.approx(0.900507880403726, abs=1e-12)


def test_the_papers_number_hardly_depends_on_influence() -> None:
    pairs = golden_pairs()
    pairs[:, :2] = np.random.default_rng(0).permuted(pairs[:, :2], axis=0)
    assert paper_alignment(pairs) == pytest.approx(0.9005, abs=0.006)


def test_the_papers_number_by_hand() -> None:
    # Shares of the student 1/4, 3/4; of the teacher 1/2, 1/2.
    assert paper_alignment([(-1, -5, 0.8), (3, 5, 0.4)]) == pytest.approx(
        (0.8 * 0.75 + 0.4 * 0.75) / 2
    )


def test_the_papers_matching_is_the_best_teacher_of_the_same_kind() -> None:
    s = np.array([[0.5, 0.9], [0.6, 0.2], [0.99, 0.1]])
    same = np.array([[True, True], [True, True], [False, False]])
    found = argmax_paper_alignment([2, 6, 1], [1, 1], s, same)
    assert found == pytest.approx(paper_alignment([(1, 6, 0.6), (1, 2, 0.9)]))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "rows and columns"),
        ([(1, 2)], "three numbers, not 2"),
        ([(1, 2, np.nan)], "NaN"),
        ([(0, 2, 1.0)], "student's influence: no component"),
        ([(1, 0, 1.0)], "teacher's influence: no component"),
    ],
)
def test_wrong_pairs_are_refused_in_words(pairs, message) -> None:
    with pytest.raises(InputError, match=message):
        paper_alignment(pairs)


def test_a_model_against_itself_is_one() -> None:
    share = np.random.default_rng(0).dirichlet(np.full(156, 0.2))
    s = np.random.default_rng(1).uniform(size=(156, 156))
    np.fill_diagonal(s, 1)
    assert transport_alignment(share, share, s)[0] == pytest.approx(1, abs=1e-9)


def test_a_merge_and_a_split_cost_nothing() -> None:
    s = np.array([[1.0, 0.1], [1.0, 0.1], [0.1, 1.0]])
    assert transport_alignment([0.3, 0.2, 0.5], [0.5, 0.5], s)[0] == pytest.approx(1, abs=1e-12)
    assert transport_alignment([0.5, 0.5], [0.3, 0.2, 0.5], s.T)[0] == pytest.approx(1, abs=1e-12)


def test_influence_that_is_missing_costs_its_share() -> None:
    s = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert transport_alignment([0.7, 0.3], [0.9, 0.1], s)[0] == pytest.approx(0.8)


def test_influences_are_scaled() -> None:
    s = np.array([[0.9, 0.2], [0.3, 0.8]])
    value = transport_alignment([1e-30, 3e-30], [5e20, 5e20], s)[0]
    assert value == pytest.approx(transport_alignment([0.25, 0.75], [0.5, 0.5], s)[0])


influences = arrays(float, st.integers(1, 6), elements=st.floats(0, 1e6)).filter(np.any)


@given(influences, influences, st.data())
def test_alignment_lies_between_zero_and_one_and_between_what_its_pairs_allow(p, q, data) -> None:
    s = data.draw(arrays(float, (len(p), len(q)), elements=st.floats(0, 1)))
    value, plan = transport_alignment(p, q, s)
    assert 0 <= value <= 1
    assert s.min() - 1e-9 <= value <= s.max() + 1e-9
    np.testing.assert_allclose(plan.sum(1), p / p.max() / (p / p.max()).sum(), atol=1e-9)
    np.testing.assert_allclose(plan.sum(0), q / q.max() / (q / q.max()).sum(), atol=1e-9)


@given(influences, influences, st.data())
def test_order_of_components_does_not_matter(p, q, data) -> None:
    s = data.draw(arrays(float, (len(p), len(q)), elements=st.floats(0, 1)))
    order = data.draw(st.permutations(range(len(q))))
    expected = transport_alignment(p, q, s)[0]
    assert transport_alignment(p, q[order], s[:, order])[0] == pytest.approx(expected, abs=1e-9)


def test_draws_without_influence_are_left_out() -> None:
    p = np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    q = np.array([[1.0], [1.0], [1.0]])
    s = np.array([[[0.5], [0.7]]] * 3)
    np.testing.assert_allclose(bootstrap_scores(transport_score, p, q, s), [0.6, 0.5])


def test_the_interval_holds_the_middle_of_the_draws() -> None:
    found = with_interval(0.5, np.linspace(0, 1, 1001), "transport")
    assert (found.low, found.high) == (pytest.approx(0.025), pytest.approx(0.975))
    assert (found.draws, found.level) == (1001, 0.95)
    assert repr(found) == "0.500 [0.025, 0.975] (transport)"
    assert float(found) == 0.5


def test_no_draws_no_interval() -> None:
    found = with_interval(0.25, np.zeros(0), "paper")
    assert (found.low, found.high, found.draws) == (None, None, 0)
    assert repr(found) == "0.250 (paper)"


def test_an_alignment_has_an_interval_only_where_it_was_resampled() -> None:
    drawn = with_interval(0.5, np.linspace(0.4, 0.6, 1001), "transport")
    assert drawn.interval == pytest.approx((0.405, 0.595))
    assert with_interval(0.5, np.array([]), "transport").interval is None
