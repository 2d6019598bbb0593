"""The validity benchmark: its students, its measurements, its statistics, and the whole of it."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from _zoo import Recipe, add_noise, ensure_student, is_made, read_network, toy_zoo, zoo
from _zoo_measure import Answers, Bench, Settings, agreement, answers, correlation, solved
from _zoo_report import competent, correlation_table, rank_correlations, spearman
from scipy.stats import spearmanr
from validity import main

import circuitkd as ckd
from circuitkd.errors import InputError
from circuitkd.models import BUNDLED_DIRECTORY, reinitialised
from circuitkd.tasks import load_task

TEACHER = BUNDLED_DIRECTORY / "tiny-teacher"


@cache
def bench() -> Bench:
    settings = Settings(n=16, n_shifted=64, null_draws=20, random_students=1)
    return Bench(load_task("numerals"), ckd.load_model("tiny-teacher"), settings)


def given(choices: list[int], metric: list[float] | None = None) -> Answers:
    return Answers(torch.tensor(choices), torch.tensor(metric or [0.0] * len(choices)))


# --- the zoo -----------------------------------------------------------------------------------


def test_the_zoo_has_two_dozen_students_that_differ():
    recipes = zoo()
    assert len({recipe.name for recipe in recipes}) == len(recipes) >= 24
    assert {len(recipe.layers) for recipe in recipes} == {1, 2, 3}
    assert {recipe.loss for recipe in recipes if recipe.steps} == {"logits", "labels"}
    assert len({recipe.steps for recipe in recipes}) >= 3
    assert len({recipe.noise for recipe in recipes}) >= 4


def test_an_untrained_student_is_the_layers_that_it_keeps(tmp_path: Path):
    teacher = read_network(TEACHER)
    student = read_network(ensure_student(Recipe((0, 3)), tmp_path, {}))
    for place, layer in enumerate((0, 3)):
        kept, original = student.transformer.h[place], teacher.transformer.h[layer]
        pairs = zip(kept.parameters(), original.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)


def test_a_random_start_keeps_nothing(tmp_path: Path):
    student = read_network(ensure_student(Recipe((0, 1), start="random"), tmp_path, {}))
    teacher = read_network(TEACHER)
    both = torch.stack([model.transformer.wte.weight.flatten() for model in (student, teacher)])
    assert torch.corrcoef(both)[0, 1].abs() < 0.02


def test_noise_has_the_stated_size_relative_to_each_matrix():
    clean, noisy = read_network(TEACHER), read_network(TEACHER)
    add_noise(noisy, 0.3, seed=0)
    for before, after in zip(clean.parameters(), noisy.parameters(), strict=True):
        if before.ndim == 2:
            assert float((after - before).std() / before.std()) == pytest.approx(0.3, rel=0.02)
        else:
            assert torch.equal(before, after)


def test_training_changes_a_student_and_its_loss_matters(tmp_path: Path):
    tasks = {"numerals": load_task("numerals")}
    recipe = Recipe((0,), steps=1)
    networks: list[Any] = [
        read_network(ensure_student(one, tmp_path, tasks))
        for one in (replace(recipe, steps=0), recipe, replace(recipe, loss="labels"))
    ]
    weights = [network.transformer.h[0].mlp.c_fc.weight for network in networks]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_finished_student_is_not_made_again_unless_its_recipe_changed(tmp_path: Path):
    recipe = Recipe((1,))
    place = ensure_student(recipe, tmp_path, {})
    made = (place / "model.safetensors").stat().st_mtime_ns
    assert ensure_student(recipe, tmp_path, {}) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == made
    assert is_made(recipe, tmp_path, {})
    assert not is_made(recipe, tmp_path, {"ioi": load_task("ioi")})
    assert not is_made(replace(recipe, seed=1), tmp_path, {})


# --- what is measured --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_teacher_as_its_own_student_is_perfect():
    row = bench().measure(bench().teacher)
    for name in ("transport", "signed", "cka", "cka_end", "agreement", "correlation"):
        assert row[name] == pytest.approx(1.0, abs=1e-6), name
    assert row["delta_performance"] == row["gain"] == 0


def test_a_random_student_is_on_the_floor():
    student = reinitialised(ckd.load_model("tiny-student"), seed=100)
    row = bench().measure(student)
    assert abs(row["calibrated"]) < 0.1
    assert row["agreement"] < 0.5
    assert row["delta_performance"] > 1


def test_the_target_uses_only_variants_that_the_teacher_solves():
    """The bundled README: 25 % and 52 % on the first two, 91 % or more on the others."""
    assert set(bench().shifted) >= {"unseen_words", "longer_prefix", "typos", "other_casing"}
    assert not {"unseen_starts", "unseen_range"} & set(bench().shifted)


def test_agreement_counts_shared_mistakes_and_is_a_mean_over_variants():
    assert agreement(given([5, 6, 7, 8]), given([5, 6, 7, 9])) == 0.75
    row = bench().measure(ckd.load_model("tiny-student"))
    assert row["agreement"] == pytest.approx(np.mean(list(row["agreement_by_variant"].values())))


def test_only_answer_words_can_be_chosen():
    prompts = bench().prompts
    words = {int(word) for group in prompts.groups for word in (*group.correct, *group.incorrect)}
    random = reinitialised(ckd.load_model("tiny-student"), seed=100)
    assert set(answers(random, prompts).choice.tolist()) <= words


def test_a_competent_models_choices_are_the_correct_answers():
    choice = answers(bench().teacher, bench().prompts).choice
    correct = torch.cat([group.correct for group in bench().prompts.groups])
    assert torch.equal(choice, correct)


def test_the_metrics_correlation_is_undefined_where_nothing_varies():
    varying = given([0] * 3, [1.0, 2.0, 4.0])
    assert correlation(varying, given([0] * 3, [2.0, 4.0, 8.0])) == pytest.approx(1.0)
    assert np.isnan(correlation(varying, given([0] * 3, [1.0, 1.0, 1.0])))


@pytest.mark.parametrize(("right", "expected"), [(64, True), (40, True), (38, False), (20, False)])
def test_a_variant_is_solved_only_if_chance_is_excluded(right: int, expected: bool):
    """Of 64 prompts: Wilson's 95 % interval lies above 1/2 from 40 right answers on."""
    assert solved(given([0] * 64, [1.0] * right + [-1.0] * (64 - right))) == expected


# --- what is made of it ------------------------------------------------------------------------


def students(n: int = 30, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    target = rng.random(n)
    return pd.DataFrame({"target": target, "same": target**3, "none": rng.random(n), "flat": 1.0})


def test_spearman_is_scipys_with_ties():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 4, size=(2, 20)).astype(float)
    assert float(spearman(x, y)) == pytest.approx(spearmanr(x, y)[0], abs=1e-12)


def test_a_monotone_predictor_ranks_perfectly_and_an_unrelated_one_does_not():
    found = rank_correlations(students(), "target", ("same", "none"))
    assert (found["same"].value, found["same"].low, found["same"].high) == (1.0, 1.0, 1.0)
    assert found["none"].low < 0 < found["none"].high


def test_predictors_are_compared_on_the_same_resampled_students():
    rows = students().assign(copy=lambda frame: frame["none"])
    found = rank_correlations(rows, "target", ("none", "copy", "same"))
    assert (found["copy"].behind_low, found["copy"].behind_high) == (0.0, 0.0)
    assert found["same"].behind == pytest.approx(1 - found["none"].value)
    assert found["same"].behind_low > 0


def test_what_never_varies_has_no_correlation():
    assert np.isnan(rank_correlations(students(), "target", ("same", "flat"))["flat"].value)


def test_a_student_with_a_missing_number_is_left_out():
    rows = students()
    rows.loc[3, "none"] = np.nan
    assert rank_correlations(rows, "target", ("same", "none"))["same"].students == len(rows) - 1


def test_competent_students_have_nine_answers_of_ten_right():
    rows = pd.DataFrame({"accuracy": [0.89, 0.9, 1.0]})
    assert competent(rows)["accuracy"].tolist() == [0.9, 1.0]


# --- the whole ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo")
    main(["--quick", "--out", str(out), "--tasks", "numerals"])
    return out


@pytest.mark.slow
def test_a_run_writes_every_student_and_a_table(toy: Path):
    result = json.loads((toy / "validity.json").read_text())
    assert [row["student"] for row in result["rows"]["numerals"]] == [r.name for r in toy_zoo()]
    assert set(result["correlations"]["numerals"]["agreement"]["all"]) >= {"transport", "paper"}
    table = (toy / "validity.md").read_text()
    assert table.count("| transport alignment |") == 2  # one for each target
    for recipe in toy_zoo():
        assert f"| `{recipe.name}` |" in table


@pytest.mark.slow
def test_a_second_run_makes_and_measures_nothing(toy: Path, capsys: pytest.CaptureFixture[str]):
    before = {file: file.stat().st_mtime_ns for file in (toy / "students").rglob("*.*")}
    main(["--quick", "--out", str(toy), "--tasks", "numerals"])
    assert {file: file.stat().st_mtime_ns for file in (toy / "students").rglob("*.*")} == before
    assert capsys.readouterr().out.strip() == (toy / "validity.md").read_text().strip()


@pytest.mark.slow
def test_what_is_finished_can_be_reported_alone(toy: Path, tmp_path: Path):
    rows = pd.DataFrame(json.loads((toy / "validity.json").read_text())["rows"]["numerals"])
    assert "n = 7" in correlation_table(rows, "agreement")
    with pytest.raises(InputError, match="finished"):
        main(["--quick", "--finished", "--out", str(tmp_path), "--tasks", "numerals"])
