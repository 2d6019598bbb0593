"""Every measure on plain arrays: known answers, slow references, chance, invariances."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from circuitkd.compare._measures_output import ANGLE_DIRECTIONS
from circuitkd.compare._measures_paper import paper_pairs, rescaled
from circuitkd.compare.alignment import paper_alignment
from circuitkd.compare.similarity import MEASURES, similarity
from circuitkd.errors import InputError
from circuitkd.nodes import Node, component_nodes

GOLDEN = Path(__file__).parents[1] / "data" / "alignment_ioi_matches.json"
RNG = np.random.default_rng
RIGID = ("cka", "procrustes", "principal_angles", "svcca")
CIRCUITS = ("qk_circuit", "ov_circuit")


def rotation(width: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(RNG(seed).normal(size=(width, width)))[0]


def causal_pattern(seed: int, size: int = 8, total: float = 1.0) -> np.ndarray:
    """A head's attention: random, no key after the query, rows that sum to ``total``."""
    weights = np.tril(RNG(seed).gamma(0.5, size=(size, size)))
    return total * weights / weights.sum(1, keepdims=True)


def arrays_for(measure: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of the kind that the measure compares, alike in part."""
    if MEASURES[measure].on == "pattern":
        x, y = causal_pattern(seed, total=0.5), causal_pattern(seed + 1, total=0.5)
        return x, (x + y) / 2
    x, y = RNG(seed).normal(size=(40, 5)), RNG(seed + 1).normal(size=(40, 5))
    x, y = x * [4, 3, 2, 1, 0.5], y * [1, 2, 1, 2, 1]
    return x, y + x


# Known answers


@pytest.mark.parametrize("measure", MEASURES)
def test_what_is_identical_scores_one(measure: str) -> None:
    x, _ = arrays_for(measure)
    expected = 1 / 3 if measure == "paper_mlp" else 1
    assert similarity(x, x, measure) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("measure", MEASURES)
def test_measures_are_symmetric_and_keep_to_their_range(measure: str) -> None:
    for seed in range(20):
        x, y = arrays_for(measure, seed)
        value = similarity(x, y, measure)
        assert value == pytest.approx(similarity(y, x, measure), abs=1e-9)
        assert MEASURES[measure].low <= value < 1


@pytest.mark.parametrize("measure", RIGID)
def test_widths_may_differ_and_padding_with_zeros_changes_nothing(measure: str) -> None:
    x, y = RNG(0).normal(size=(60, 3)), RNG(1).normal(size=(60, 7))
    y[:, :3] += x
    value = similarity(x, y, measure)
    assert 0.1 < value < 0.95
    assert similarity(np.pad(x, ((0, 0), (0, 4))), y, measure) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("measure", [name for name, m in MEASURES.items() if m.on == "output"])
def test_a_constant_output_resembles_nothing(measure: str) -> None:
    if measure != "paper_mlp":  # which does not centre
        assert similarity(RNG(0).normal(size=(10, 4)), np.full((10, 4), 0.1), measure) == 0


@pytest.mark.parametrize("measure", CIRCUITS)
def test_a_circuit_that_says_nothing_about_words_resembles_nothing(measure: str) -> None:
    flat = np.repeat(RNG(0).normal(size=(6, 1)), 5, axis=1)
    assert similarity(flat, RNG(1).normal(size=(6, 5)), measure) == 0
    assert similarity(flat, flat, measure) == 0


def test_opposite_scores_correlate_negatively() -> None:
    x = RNG(0).normal(size=(6, 6))
    assert similarity(x, -x, "ov_circuit") == pytest.approx(-1)
    assert similarity(x, -x, "procrustes") == pytest.approx(1)  # a reflection is a rotation here


def test_uniform_attention_says_nothing() -> None:
    uniform = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    assert similarity(uniform, causal_pattern(0, 6), "attention_correlation") == 0


def test_disjoint_attention_has_the_largest_divergence() -> None:
    first, last = np.eye(4)[[0, 0, 0]], np.eye(4)[[3, 3, 3]]
    assert similarity(first, last, "attention_js") == pytest.approx(0, abs=1e-12)


def test_attention_to_keys_that_are_left_out_counts() -> None:
    # One looks elsewhere with half its attention, the other with all of it.
    x, y = np.array([[0.5, 0.0]]), np.array([[0.0, 0.0]])
    expected = 1 - jensenshannon([0.5, 0, 0.5], [0, 0, 1], base=2) ** 2
    assert similarity(x, y, "attention_js") == pytest.approx(expected)


# Slow references


def test_procrustes_is_what_the_best_rotation_explains() -> None:
    x, y = RNG(0).normal(size=(30, 4)), RNG(1).normal(size=(30, 6))
    y[:, :4] += x
    left, right = np.pad(x - x.mean(0), ((0, 0), (0, 2))), y - y.mean(0)
    turn, _ = scipy.linalg.orthogonal_procrustes(right, left)
    turned = right @ turn
    scale = (left * turned).sum() / (turned**2).sum()
    residual = ((left - scale * turned) ** 2).sum() / (left**2).sum()
    assert similarity(x, y, "procrustes") == pytest.approx(1 - residual, abs=1e-12)


def test_principal_angles_are_scipys_between_the_top_directions() -> None:
    x, y = RNG(0).normal(size=(50, 14)), RNG(1).normal(size=(50, 12))
    y[:, :12] += x[:, :12]
    spans = [
        scipy.linalg.svd(m - m.mean(0), full_matrices=False)[0][:, :ANGLE_DIRECTIONS]
        for m in (x, y)
    ]
    expected = (np.cos(scipy.linalg.subspace_angles(*spans)) ** 2).mean()
    assert similarity(x, y, "principal_angles") == pytest.approx(expected, abs=1e-12)


def test_principal_angles_compare_as_many_directions_as_both_have() -> None:
    x = RNG(0).normal(size=(50, 12)) * np.geomspace(10, 1, 12)
    x -= x.mean(0)
    line = np.linalg.svd(x)[0][:, :1]
    assert similarity(x, line, "principal_angles") == pytest.approx(1)


def test_svcca_is_canonical_correlation_of_what_holds_most_of_the_variance() -> None:
    x, y = RNG(0).normal(size=(80, 5)), RNG(1).normal(size=(80, 4))
    y[:, 0] += 2 * x[:, 1]
    x[:, 4] *= 1e-3  # less than 1 % of the variance
    left, right = (
        (m - m.mean(0)) @ np.linalg.svd(m - m.mean(0))[2][:keep].T for m, keep in ((x, 4), (y, 4))
    )
    white = [scipy.linalg.inv(scipy.linalg.sqrtm(m.T @ m)) for m in (left, right)]
    correlations = np.linalg.svd(white[0] @ left.T @ right @ white[1])[1]
    assert similarity(x, y, "svcca") == pytest.approx(correlations.mean(), abs=1e-9)


def test_attention_js_is_scipys_query_by_query() -> None:
    x, y = causal_pattern(0), causal_pattern(1)
    rows = [1 - jensenshannon(a, b, base=2) ** 2 for a, b in zip(x, y, strict=True)]
    assert similarity(x, y, "attention_js") == pytest.approx(np.mean(rows), abs=1e-12)


def test_attention_correlation_subtracts_uniform_attention() -> None:
    x, y = causal_pattern(0), causal_pattern(1)
    uniform = np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None]
    left, right = (x - uniform).ravel(), (y - uniform).ravel()
    expected = left @ right / np.sqrt((left @ left) * (right @ right))
    assert similarity(x, y, "attention_correlation") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("measure", CIRCUITS)
def test_circuits_correlate_over_all_pairs_of_words(measure: str) -> None:
    x, y = RNG(0).normal(size=(6, 9)), RNG(1).normal(size=(6, 9))
    y += x
    left, right = (m - m.mean(1, keepdims=True) for m in (x, y))
    expected = np.corrcoef(left.ravel(), right.ravel())[0, 1]
    assert similarity(x, y, measure) == pytest.approx(expected, abs=1e-12)


# Chance


def unrelated(measure: str, rows: int, widths: tuple[int, int], draws: int) -> float:
    values = [
        similarity(
            RNG(2 * s).normal(size=(rows, widths[0])),
            RNG(2 * s + 1).normal(size=(rows, widths[1])),
            measure,
        )
        for s in range(draws)
    ]
    return float(np.mean(values))


def test_unrelated_spans_share_k_of_n_minus_one_directions() -> None:
    assert unrelated("principal_angles", 31, (4, 4), 300) == pytest.approx(4 / 30, abs=0.01)
    assert unrelated("principal_angles", 41, (12, 12), 300) == pytest.approx(10 / 40, abs=0.01)


@pytest.mark.parametrize(("rows", "widths"), [(100, (2, 20)), (400, (10, 80))])
def test_procrustes_of_unrelated_arrays_grows_with_width_over_rows(rows, widths) -> None:
    found = unrelated("procrustes", rows, widths, 40)
    assert found == pytest.approx(widths[0] / rows, rel=0.15)


@pytest.mark.parametrize(("rows", "widths"), [(100, (2, 20)), (400, (10, 80))])
def test_svcca_of_unrelated_arrays_grows_with_directions_over_rows(rows, widths) -> None:
    found = unrelated("svcca", rows, widths, 40)
    assert found == pytest.approx(np.sqrt(widths[1] / rows), rel=0.15)


@pytest.mark.parametrize("measure", ["cka", *CIRCUITS])
def test_unrelated_arrays_score_zero_where_that_is_claimed(measure: str) -> None:
    assert MEASURES[measure].chance.startswith("0")
    assert unrelated(measure, 20, (10, 10), 300) == pytest.approx(0, abs=0.01)


def test_unrelated_heads_score_zero_only_in_centred_attention() -> None:
    def mean(measure: str) -> float:
        pairs = [(causal_pattern(2 * s), causal_pattern(2 * s + 1)) for s in range(200)]
        return float(np.mean([similarity(x, y, measure) for x, y in pairs]))

    assert mean("attention_correlation") == pytest.approx(0, abs=0.02)
    assert min(mean("attention_cosine"), mean("attention_js"), mean("paper_head")) > 0.4


# Invariances


def changed(x: np.ndarray, invariance: str, draw: np.random.Generator, size: float) -> np.ndarray:
    if invariance == "translation":
        return x + draw.uniform(0, size, size=x.shape[1])
    if invariance == "scale":
        return x * draw.uniform(0.2, 0.9)
    if invariance == "row constant":
        return x + draw.uniform(0, size, size=(len(x), 1))
    return x @ rotation(x.shape[1], int(draw.integers(1000)))


def step(measure: str) -> float:
    """Small enough that attention to 8 keys stays below 1."""
    return 0.5 / 8 if MEASURES[measure].on == "pattern" else 5.0


KINDS = ("translation", "scale", "rotation", "row constant")


@pytest.mark.parametrize("measure", MEASURES)
@given(seed=st.integers(0, 10_000))
def test_measures_do_not_notice_what_they_claim_not_to_notice(measure: str, seed: int) -> None:
    x, y = arrays_for(measure, seed)
    expected = similarity(x, y, measure)
    for invariance in MEASURES[measure].invariances:
        moved = changed(y, invariance, RNG(seed), step(measure))
        assert similarity(x, moved, measure) == pytest.approx(expected, abs=1e-8), invariance


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("invariance", KINDS)
def test_and_claim_everything_that_they_do_not_notice(measure: str, invariance: str) -> None:
    if invariance in MEASURES[measure].invariances:
        return
    x, y = arrays_for(measure)
    expected = similarity(x, y, measure)
    try:
        found = similarity(x, changed(y, invariance, RNG(0), step(measure)), measure)
    except InputError:
        assert measure == "attention_js"  # a rotated distribution is none
    else:
        assert abs(found - expected) > 1e-3


@pytest.mark.parametrize("measure", RIGID)
def test_rotating_into_more_dimensions_changes_nothing(measure: str) -> None:
    x, y = arrays_for(measure)
    wider = np.pad(y, ((0, 0), (0, 4))) @ rotation(9)
    assert similarity(x, wider, measure) == pytest.approx(similarity(x, y, measure), abs=1e-9)


# Refusals


@pytest.mark.parametrize(
    ("x", "y", "measure", "message"),
    [
        (np.ones((1, 3)), np.ones((1, 3)), "procrustes", "One row says nothing"),
        (RNG(0).normal(size=(8, 4)), RNG(1).normal(size=(8, 4)), "svcca", "needs more than 8 rows"),
        (np.ones((3, 3)), np.ones((3, 4)), "qk_circuit", "not 3 with 4 columns"),
        (np.full((2, 2), 0.5), np.full((2, 2), 0.7), "attention_js", "sum to 1"),
        (np.full((2, 2), 0.5), np.full((2, 2), -0.1), "attention_js", "not negative"),
    ],
)
def test_wrong_arrays_are_refused_in_words(x, y, measure, message) -> None:
    with pytest.raises(InputError, match=message):
        similarity(x, y, measure)


# The paper's rescaling and list of pairs


def test_rescaled_mlps_have_the_heads_mean_and_spread_and_a_best_of_one() -> None:
    mlps, heads = RNG(0).uniform(0.1, 0.2, size=(12, 6)), RNG(1).uniform(0.2, 1, size=(144, 72))
    found = rescaled(mlps, heads)
    assert found.max() == 1
    assert found.argmax() == mlps.argmax()
    assert found.std() / found.mean() == pytest.approx(heads.std(ddof=1) / heads.mean())
    slope, offset = np.polyfit(mlps.ravel(), found.ravel(), 1)
    np.testing.assert_allclose(found, slope * mlps + offset, atol=1e-12)
    # The largest, before all are divided by it, by hand.
    largest = heads.mean() + heads.std(ddof=1) * (mlps.max() - mlps.mean()) / mlps.std()
    assert found.mean() == pytest.approx(heads.mean() / largest)


def test_mlps_that_are_all_alike_all_become_one() -> None:
    heads = np.array([[0.2, 0.8]])
    np.testing.assert_allclose(rescaled(np.full((2, 2), 1 / 3), heads), np.ones((2, 2)))


def golden_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Influences of both models, and the recorded best similarities, 0 for all other pairs."""
    golden = json.loads(GOLDEN.read_text())
    sides = {"teacher": component_nodes(12, 12), "student": component_nodes(6, 12)}
    influence = {
        side: np.array([abs(golden["influence"][side][node.name]) for node in nodes])
        for side, nodes in sides.items()
    }
    place = {side: {node.name: k for k, node in enumerate(nodes)} for side, nodes in sides.items()}
    table = np.zeros((156, 78))
    for student, (teacher, value) in golden["matches"].items():
        table[place["teacher"][teacher], place["student"][student]] = value
    return influence["teacher"], influence["student"], table


def test_influences_and_matches_as_recorded_give_the_printed_score() -> None:
    teacher, student, table = golden_tables()
    pairs = paper_pairs(teacher, student, table, component_nodes(12, 12), component_nodes(6, 12))
    assert len(pairs) == 78
    # The matches are recorded to four digits.
    assert paper_alignment(pairs) == pytest.approx(0.9005086903589632, abs=1e-12)


def test_heads_below_a_threshold_may_be_listed_twice() -> None:
    nodes = (Node.attention_head(0, 0), Node.attention_head(0, 1), Node.mlp(0))
    table = np.array([[0.9, 0.2, 1.0], [0.3, 0.96, 1.0], [1.0, 1.0, 0.4]])
    once = paper_pairs([1, 2, 3], [4, 5, 6], table, nodes, nodes)
    np.testing.assert_allclose(once, [[4, 1, 0.9], [5, 2, 0.96], [6, 3, 0.4]])
    twice = paper_pairs([1, 2, 3], [4, 5, 6], table, nodes, nodes, repeat_heads_below=0.95)
    np.testing.assert_allclose(twice, [*once, [4, 1, 0.9]])
