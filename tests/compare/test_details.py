"""What a comparison measures on request, against the functions that measure it alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import circuitkd as ckd
from circuitkd.circuits.roles import head_roles
from circuitkd.compare.comparison import Comparison, compare, load_comparison
from circuitkd.compare.robustness import robustness
from circuitkd.compare.similarity import RECORDED_MEASURES
from circuitkd.compare.swap import strongest_matches, swap_test

MODELS = ("tiny-teacher", "tiny-student")
QUICK: dict[str, Any] = {"n": 16, "seed": 2, "draws": 20, "null_draws": 0}


@pytest.fixture(scope="module")
def result() -> Comparison:
    return compare(*MODELS, "weekdays", details=True, **QUICK)


@pytest.fixture(scope="module")
def loaded():
    teacher, student = (ckd.load_model(name) for name in MODELS)
    prompts = ckd.load_task("weekdays").sample_pair(teacher, student, 16, 2)
    return (teacher, student), prompts


def test_roles_are_those_of_head_roles(result: Comparison, loaded) -> None:
    models, prompts = loaded
    assert result.roles is not None
    for side, model, own in zip(("teacher", "student"), models, prompts, strict=True):
        alone = head_roles(model, own, seed=2)
        assert result.roles[side].scores.keys() == alone.scores.keys()
        for role, scores in alone.scores.items():
            torch.testing.assert_close(result.roles[side].scores[role], scores)


def test_swaps_are_those_of_the_swap_test(result: Comparison, loaded) -> None:
    models, prompts = loaded
    assert result.swaps is not None
    alone = swap_test(models[0], models[1], prompts, strongest_matches(result), seed=2)
    pd.testing.assert_frame_equal(result.swaps.frame, alone.frame)


def test_matches_say_which_are_verified(result: Comparison) -> None:
    assert result.swaps is not None
    tested = result.matches.dropna(subset=["verified"])
    pairs = {(ours.name, theirs.name) for ours, theirs in result.swaps.matches}
    assert set(zip(tested["teacher"], tested["student"], strict=True)) == pairs
    verified = tested[tested["verified"].astype(bool)]
    kept = {(ours.name, theirs.name) for ours, theirs in result.swaps.verified}
    assert set(zip(verified["teacher"], verified["student"], strict=True)) == kept
    assert len(result.matches) > len(tested) > 0
    assert result.matches["mass"].is_monotonic_decreasing


def test_losses_are_not_put_to_the_swap_test(result: Comparison) -> None:
    for ours, theirs in strongest_matches(result, top=1000):
        threshold = result.restructuring.threshold
        assert result.similarity.loc[ours.name, theirs.name] >= threshold


@pytest.mark.slow
def test_robustness_is_that_of_the_function(result: Comparison) -> None:
    alone = robustness(*MODELS, "weekdays", n=16, seed=2)
    pd.testing.assert_frame_equal(result.robustness.frame, alone.frame)
    pd.testing.assert_frame_equal(result.robustness.agreement, alone.agreement)
    assert result.robustness.brittleness is not None
    assert alone.brittleness is not None
    pd.testing.assert_frame_equal(
        result.robustness.brittleness.slopes, alone.brittleness.slopes, rtol=1e-4
    )


def test_without_details_brittleness_is_there_all_the_same(result: Comparison) -> None:
    short = compare(*MODELS, "weekdays", **QUICK)
    assert short.roles is None
    assert short.swaps is None
    assert "verified" not in short.matches
    assert [condition.name for condition in short.robustness.conditions] == ["clean"]
    left, right = short.robustness.brittleness, result.robustness.brittleness
    assert left is not None
    assert right is not None
    pd.testing.assert_frame_equal(left.frame, right.frame)
    pd.testing.assert_frame_equal(left.slopes, right.slopes)
    assert short.alignment == result.alignment


@pytest.mark.slow
def test_a_variant_is_compared_with_the_other_variants() -> None:
    found = compare(*MODELS, "weekdays", variant="typos", details=True, **QUICK)
    names = [condition.name for condition in found.robustness.conditions]
    assert names[0] == "clean"
    assert "typos" not in names
    clean = found.influences["student"].clean
    torch.testing.assert_close(found.robustness.metrics["student"][0], clean, atol=1e-4, rtol=1e-4)


def test_what_was_saved_is_what_is_loaded(result: Comparison, tmp_path: Path) -> None:
    result.save(tmp_path)
    again = load_comparison(tmp_path)
    assert repr(again) == repr(result)
    assert again.to_json() == result.to_json()


@pytest.mark.parametrize(
    "measure",
    [
        pytest.param(m, marks=[] if m in ("default", "cka") else pytest.mark.slow)
        for m in RECORDED_MEASURES
    ],
)
def test_every_measure_can_stand_behind_an_alignment(measure: str) -> None:
    """A model against itself is alike by every measure but the paper's."""
    own = compare(
        "tiny-teacher", "tiny-teacher", "weekdays", measure=measure, n=12, draws=5, null_draws=5,
        random_students=1,
    )  # fmt: skip
    assert own.config["measure"] == measure
    assert own.alignment.low is not None
    diagonal = np.diagonal(own.similarity)
    mlps = np.array([node.kind == "mlp" for node in own.influences["teacher"].nodes])
    np.testing.assert_allclose(diagonal[~mlps], 1, atol=1e-5)
    if measure == "paper":
        np.testing.assert_allclose(diagonal[mlps], 1 / 3, atol=1e-5)
        assert own.alignment.value < 0.99
    elif measure != "paper_rescaled":
        assert own.alignment.value == pytest.approx(1, abs=1e-5)
        assert own.alignment.floor is not None
        assert own.alignment.floor.value < 0.9
