"""Brittleness under ablation: the published statistics from the recorded drops, and by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from circuitkd.circuits.influence_result import Influence
from circuitkd.compare._robustness_statistics import (
    basic_interval,
    component_difference,
    component_interval,
    drop_statistics,
)
from circuitkd.compare.robustness import (
    Brittleness,
    PairedBrittleness,
    ablation_brittleness,
    brittleness_of,
    clamped_drops,
)
from circuitkd.errors import InputError
from circuitkd.nodes import component_nodes

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "robustness_numerals.json").read_text())
EXPECTED = GOLDEN["expected"]
PARAMETERS = {"teacher": 124_000_000, "student": 82_000_000}
SIDES = {"teacher": "gpt2", "student": "distilgpt2"}


def recorded_drops(side: str) -> np.ndarray:
    """In published order: all heads, then all MLPs."""
    model = GOLDEN["models"][SIDES[side]]
    return clamped_drops(model["head_retained_pct"] + model["mlp_retained_pct"])


def recorded_influence(side: str) -> Influence:
    """The same as effects on one prompt and its copy, in the order of nodes."""
    model = GOLDEN["models"][SIDES[side]]
    heads = np.reshape(model["head_retained_pct"], (model["layers"], model["heads"]))
    retained = np.column_stack([heads, model["mlp_retained_pct"]]).ravel()
    return influence_of(retained / 100 - 1, layers=model["layers"], heads=model["heads"])


def influence_of(
    effects: np.ndarray | list[float], *, clean: float = 1.0, layers: int = 1, heads: int = 2
) -> Influence:
    """Effects by node; one row, or one a prompt."""
    rows = torch.tensor(np.atleast_2d(np.asarray(effects, dtype=np.float32)))
    rows = rows.expand(2, -1) if len(rows) == 1 else rows
    return Influence(
        model="model",
        task="numerals",
        variant=None,
        bos=None,
        ablation="mean",
        metric="logit_difference",
        nodes=component_nodes(layers, heads),
        effects=rows.contiguous(),
        clean=torch.full((len(rows),), clean),
    )


def noisy_influence(seed: int, *, prompts: int = 40, clean: float = 4.0) -> Influence:
    rng = np.random.default_rng(seed)
    effects = np.array([-2.0, -0.5, 0.3]) + 0.4 * rng.normal(size=(prompts, 3))
    return replace(
        influence_of(effects), clean=torch.tensor(clean + rng.normal(size=prompts)).float()
    )


class TestPublished:
    def test_the_published_means_and_intervals_to_the_digit(self) -> None:
        for side in SIDES:
            drops = recorded_drops(side)
            low, high = component_interval(drops, drop_statistics())["mean_drop_pct"]
            found = [drops.mean(), low, high]
            assert found == pytest.approx(EXPECTED[f"{side}_mean"], abs=1e-9)
        means = [round(float(recorded_drops(side).mean()), 2) for side in SIDES]
        assert means == EXPECTED["published"] == [3.06, 12.24]

    def test_the_published_difference_draws_the_teacher_before_the_student(self) -> None:
        drops = [recorded_drops(side) for side in SIDES]
        found = component_difference(drops[0], drops[1], drop_statistics())["mean_drop_pct"]
        assert found == pytest.approx(EXPECTED["delta_mean_bootstrap"], abs=1e-9)

    def test_severity_and_gini(self) -> None:
        statistics = drop_statistics()
        for side in SIDES:
            for name in ("severity", "gini"):
                found = float(statistics[name](recorded_drops(side)))
                assert found == pytest.approx(EXPECTED[f"{side}_{name}"], abs=1e-12)

    def test_all_of_it_from_influences(self) -> None:
        """Effects are kept in float32, which leaves 1e-5 of a percent."""
        pair = brittleness_of({side: recorded_influence(side) for side in SIDES}, PARAMETERS)
        row = pair.frame.loc["mean_drop_pct"]
        slope = pair.slopes.loc["mean_drop_pct"]
        assert pair.compression == pytest.approx(EXPECTED["C"], abs=1e-12)
        for side in SIDES:
            own = getattr(pair, side).statistics.loc["mean_drop_pct"]
            found = [own["value"], own["components_low"], own["components_high"]]
            assert found == pytest.approx(EXPECTED[f"{side}_mean"], abs=1e-4)
            assert len(getattr(pair, side).frame) == EXPECTED[f"n_{side}"]
        assert row["difference"] == pytest.approx(EXPECTED["delta_mean_exact"], abs=1e-4)
        assert slope["slope"] == pytest.approx(EXPECTED["beta_mean_exact"], abs=1e-4)
        assert slope["components_mean"] == pytest.approx(EXPECTED["beta_mean_bootstrap"], abs=1e-4)
        assert slope["components_mean"] / 10 == pytest.approx(EXPECTED["pp_per_0p1C"], abs=1e-5)
        ends = [slope["components_low"], slope["components_high"]]
        assert ends == pytest.approx(EXPECTED["beta_mean_ci"], abs=1e-3)
        severity = pair.slopes.loc["severity"]
        assert severity["slope"] == pytest.approx(EXPECTED["beta_severity"], abs=1e-5)
        assert "3.06 → 12.2 %" in repr(pair)


class TestBrittleness:
    def test_by_hand(self) -> None:
        """Drops of 60 %, 0 (ablation helps) and 100 % (more than all is lost)."""
        found = ablation_brittleness(influence_of([-1.2, 0.5, -3.0], clean=2.0))
        assert found.frame["drop_pct"].tolist() == pytest.approx([60, 0, 100])
        assert found.frame["drop"].tolist() == pytest.approx([1.2, 0, 3.0])
        values = found.statistics["value"]
        assert values["mean_drop_pct"] == pytest.approx(160 / 3)
        assert values["total_drop_pct"] == pytest.approx(160)
        assert values["worst_drop_pct"] == pytest.approx(100)
        assert values["severity"] == pytest.approx((0.5 + 1) / 3)
        assert values["mean_drop"] == pytest.approx(4.2 / 3)
        assert values["gini"] == pytest.approx((60 * 0 + 100 * 2) / (3 * 160))

    def test_half_the_components_doing_the_same_have_twice_the_mean_and_the_same_total(
        self,
    ) -> None:
        many = ablation_brittleness(influence_of([-0.5, 0, -0.25, 0, 0, 0], layers=2))
        few = ablation_brittleness(influence_of([-0.5, -0.25, 0]))
        assert few.mean_drop == pytest.approx(2 * many.mean_drop)
        totals = [own.statistics.loc["total_drop_pct", "value"] for own in (many, few)]
        assert totals == pytest.approx([75, 75])

    @pytest.mark.parametrize("clean", [-0.2, 0.0])
    def test_a_weak_baseline_has_logits_but_no_percentages(self, clean: float) -> None:
        found = ablation_brittleness(influence_of([-1.2, 0.5, -3.0], clean=clean))
        assert not found.competent
        assert found.statistics.loc["mean_drop", "value"] == pytest.approx(4.2 / 3)
        assert np.isfinite(found.statistics.loc["mean_drop"].drop("unit").astype(float)).all()
        percentages = found.statistics.drop(index="mean_drop", columns="unit")
        assert percentages.isna().to_numpy().all()
        assert found.frame["drop_pct"].isna().all()
        assert np.isnan(found.mean_drop)
        assert np.isnan(found.severity)
        assert "percentages are withheld" in repr(found)
        assert "%" not in repr(found)

    def test_a_pair_with_one_weak_baseline_has_a_difference_in_logits_only(self) -> None:
        weak = influence_of([-0.5, 0.0, 0.0], clean=-1.0)
        pair = brittleness_of({"teacher": noisy_influence(0), "student": weak_copy(weak, 40)})
        assert np.isfinite(pair.frame.loc["mean_drop", "difference"])
        rest = pair.frame.drop(index="mean_drop")
        assert rest["teacher"].notna().all()
        gone = ["student", "difference", "components_low", "prompts_low", "prompts_high"]
        assert rest[gone].isna().to_numpy().all()

    def test_more_prompts_narrow_the_interval_over_prompts_only(self) -> None:
        few, many = (
            ablation_brittleness(noisy_influence(0, prompts=prompts)).statistics.loc[
                "mean_drop_pct"
            ]
            for prompts in (20, 320)
        )
        width = [row["prompts_high"] - row["prompts_low"] for row in (few, many)]
        assert width[0] / width[1] == pytest.approx(4, rel=0.4)
        width = [row["components_high"] - row["components_low"] for row in (few, many)]
        assert width[0] == pytest.approx(width[1], rel=0.1)

    def test_a_basic_interval_mirrors_what_resampling_adds(self) -> None:
        """Resampled values between 1.0 and 1.4 of a value of 1: it was itself as much too high."""
        draws = np.linspace(1.0, 1.4, 1001)
        assert basic_interval(1.0, draws) == pytest.approx((0.61, 0.99))
        assert basic_interval(1.0, draws, low=0.7, high=0.8) == pytest.approx((0.7, 0.8))

    def test_a_model_against_itself_differs_by_exactly_nothing(self) -> None:
        own = noisy_influence(3)
        row = brittleness_of({"teacher": own, "student": own}).frame.drop(columns="unit")
        for column in ("difference", "prompts_low", "prompts_high"):
            assert (row[column] == 0).all()

    def test_both_models_draw_the_same_prompts(self) -> None:
        """The student loses half a logit more on every prompt: resampling cannot change that."""
        rng = np.random.default_rng(0)
        effects = rng.normal(-3, 0.5, size=(40, 3))
        sides = {"teacher": influence_of(effects), "student": influence_of(effects - 0.5)}
        row = brittleness_of(sides).frame.loc["mean_drop"]
        found = [row[name] for name in ("difference", "prompts_low", "prompts_high")]
        assert found == pytest.approx([0.5, 0.5, 0.5], abs=1e-6)

    def test_there_is_no_slope_without_compression(self) -> None:
        own = {"teacher": noisy_influence(0), "student": noisy_influence(1)}
        for parameters in (None, {"teacher": 10, "student": 10}, {"teacher": 10, "student": 20}):
            pair = brittleness_of(own, parameters)
            assert pair.compression is None
            assert pair.slopes.drop(columns="unit").isna().to_numpy().all()
            assert "fewer parameters" not in repr(pair)

    def test_severity_has_parameters(self) -> None:
        own = influence_of([-0.6, -0.3, 0.0])
        found = ablation_brittleness(own, limit=50.0, threshold=10.0, alpha=2.0)
        assert found.severity == pytest.approx((1 + 0.25) / 3)

    @pytest.mark.parametrize(
        "wrong", [{"limit": 10.0}, {"threshold": -1.0}, {"alpha": 0.0}, {"threshold": 100.0}]
    )
    def test_impossible_parameters_of_severity(self, wrong: dict[str, float]) -> None:
        with pytest.raises(InputError, match="Severity needs"):
            ablation_brittleness(influence_of([-1.0, 0, 0]), **wrong)

    def test_influences_that_do_not_belong_together(self) -> None:
        own = noisy_influence(0)
        for other, words in (
            (noisy_influence(1, prompts=20), "40 and 20 prompts"),
            (replace(own, ablation="zero"), "ablation: mean and zero"),
            (replace(own, task="ioi"), "task: numerals and ioi"),
        ):
            with pytest.raises(InputError, match=words):
                brittleness_of({"teacher": own, "student": other})
        with pytest.raises(InputError, match="'teacher' and 'student'"):
            brittleness_of({"teacher": own})
        with pytest.raises(InputError, match="Parameters of"):
            brittleness_of({"teacher": own, "student": own}, {"teacher": 3})

    @pytest.mark.parametrize("clean", [4.0, -4.0])
    def test_what_is_saved_is_what_is_loaded(self, tmp_path: Path, clean: float) -> None:
        sides = {
            "teacher": noisy_influence(0),
            "student": noisy_influence(1, clean=clean),
        }
        pair = brittleness_of(sides, PARAMETERS)
        pair.save(tmp_path / "pair.json")
        pair.student.save(tmp_path / "one.json")
        again = PairedBrittleness.load(tmp_path / "pair.json")
        one = Brittleness.load(tmp_path / "one.json")
        assert repr(again) == repr(pair)
        assert again.parameters == pair.parameters
        pd.testing.assert_frame_equal(again.frame, pair.frame)
        for loaded in (again.student, one):
            pd.testing.assert_frame_equal(loaded.frame, pair.student.frame)
            pd.testing.assert_frame_equal(loaded.statistics, pair.student.statistics)
        with pytest.raises(InputError, match="no paired brittleness"):
            PairedBrittleness.load(tmp_path / "one.json")
        with pytest.raises(InputError, match="cannot be read"):
            Brittleness.load(tmp_path / "none.json")


def weak_copy(influence: Influence, prompts: int) -> Influence:
    return replace(
        influence,
        effects=influence.effects[:1].expand(prompts, -1).contiguous(),
        clean=influence.clean[:1].expand(prompts).contiguous(),
    )
