"""The whole comparison: of networks taken apart by hand, and from a task to a saved result."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from compare.synthetic import (
    CONFIG,
    compare_networks,
    copy_head,
    gpt2_of_heads,
    head_weights,
    influence_of,
    permuted_heads,
    random_components,
    with_split_head,
    without_head,
)
from random_models import random_gpt2, random_llama
from tiny import save_tiny_model

import circuitkd as ckd
from circuitkd.compare.comparison import (
    Comparison,
    compare,
    compare_recorded,
    load_comparison,
)
from circuitkd.errors import InputError, TaskError
from circuitkd.models import load_model
from circuitkd.runs import MemoryCheckpoint

FEW: dict[str, Any] = {"null_draws": 50, "random_students": 1}


def effects_on(n_nodes: int, **influence: float) -> torch.Tensor:
    """Effects of 16 prompts: node number -> mean effect, with some spread over prompts."""
    effects = torch.zeros(16, n_nodes)
    spread = torch.linspace(0.5, 1.5, 16)
    for node, size in influence.items():
        effects[:, int(node.removeprefix("n"))] = size * spread
    return effects


def synthetic_pair(merged: bool):
    """Teacher heads 0 and 2 and the MLP matter; head 2 is a half-strength copy of head 0.

    The student is the same model with head 2 silent and head 0 doing all of its work (a merge), or
    the teacher as it is.
    """
    teacher = random_components(layers=1, heads=4, batches=(9, 7), seed=0)
    teacher = copy_head(teacher, 0, 2)
    before = influence_of(teacher, effects_on(5, n0=-2, n2=-1, n4=-3), "split")
    after = influence_of(teacher, effects_on(5, n0=-3, n4=-3), "whole")
    return teacher, before, after if merged else before


def recorded(teacher, student, left, right, **config) -> Comparison:
    sides = {"teacher": left, "student": right}
    return compare_recorded(sides, (teacher, student), {**CONFIG, **config})


# What the number must not depend on, and what it must


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_a_model_against_itself_is_one(make) -> None:
    network = make(layers=2)
    result = compare_networks(network, network)
    for number in (result.alignment.value, result.alignment.low, result.alignment.high):
        assert number == pytest.approx(1, abs=1e-6)
    assert len(result.restructuring.drops) == 0
    assert (result.matches["teacher"] == result.matches["student"]).all()


def test_another_model_is_not() -> None:
    result = compare_networks(random_gpt2(layers=2, seed=0), random_gpt2(layers=2, seed=1))
    assert result.alignment.value < 0.6
    assert result.alignment.low is not None
    assert result.alignment.high is not None
    assert result.alignment.low < result.alignment.value < result.alignment.high
    assert result.restructuring.lost > 0.1


def test_permuting_the_students_heads_changes_nothing_but_names() -> None:
    teacher, student = gpt2_of_heads(layers=2, seed=0), gpt2_of_heads(layers=2, seed=1)
    order = [2, 0, 3, 1]
    plain = compare_networks(teacher, student)
    moved = compare_networks(teacher, permuted_heads(student, 1, order))
    for name in ("value", "low", "high"):
        assert getattr(moved.alignment, name) == pytest.approx(
            getattr(plain.alignment, name), abs=1e-4
        )
    assert plain.paper_alignment
    assert moved.paper_alignment
    assert moved.paper_alignment.value == pytest.approx(plain.paper_alignment.value, abs=1e-4)
    names = {f"a1.h{new}": f"a1.h{old}" for new, old in enumerate(order)}
    renamed = moved.similarity.rename(columns=names)[plain.similarity.columns]
    np.testing.assert_allclose(renamed, plain.similarity, atol=1e-4)
    for _table in ("teacher", "lost"):
        np.testing.assert_array_equal(
            moved.restructuring.drops["teacher"], plain.restructuring.drops["teacher"]
        )
    np.testing.assert_allclose(
        moved.restructuring.drops["lost"], plain.restructuring.drops["lost"], atol=1e-4
    )
    merged = [names.get(name, name) for name in moved.restructuring.merges["student"]]
    assert merged == plain.restructuring.merges["student"].tolist()


def rotated(network, seed: int = 0):
    """A Llama rewritten in another basis of the residual stream: the same function."""
    width = network.config.hidden_size
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)))
    state = {}
    for name, weight in network.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight = q.T @ weight
        elif name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
            weight = weight @ q
        state[name] = weight
    moved = type(network)(network.config).eval()
    moved.load_state_dict(state)
    return moved


def test_rotating_the_residual_stream_changes_nothing() -> None:
    teacher, student = random_llama(layers=2, seed=0), random_llama(layers=2, seed=1)
    for network in (teacher, student):
        for name, weight in network.named_parameters():
            if "norm" in name:
                weight.data.fill_(1)
    tokens = torch.arange(6)[None]
    moved = rotated(student)
    torch.testing.assert_close(moved(tokens).logits, student(tokens).logits, atol=1e-3, rtol=1e-3)
    plain, turned = compare_networks(teacher, student), compare_networks(teacher, moved)
    np.testing.assert_allclose(turned.similarity, plain.similarity, atol=1e-3)
    assert turned.alignment.value == pytest.approx(plain.alignment.value, abs=1e-3)
    assert compare_networks(student, moved).alignment.value == pytest.approx(1, abs=1e-3)


def split_networks():
    """A network with a head that writes nothing, and the same function with a head split in two.

    What the layer writes is small, so that ablations add up as they would in a linear network.
    """
    whole = gpt2_of_heads(layers=2, seed=0)
    for layer in range(2):
        head_weights(whole, layer)[1].mul_(0.05)
    whole = without_head(whole, 1, 3)
    return whole, with_split_head(whole, 1, head=0, into=3)


def test_splitting_a_head_in_two_costs_nothing() -> None:
    whole, split = split_networks()
    result = compare_networks(whole, split)
    assert result.influences["student"].share()[5] > 0.001  # the split head matters
    assert result.alignment.value == pytest.approx(1, abs=2e-3)
    assert result.similarity.loc["a1.h0", "a1.h3"] == pytest.approx(1, abs=1e-4)
    [row] = result.restructured(least=0.0).splits.to_dict("records")
    assert row["teacher"] == "a1.h0"
    assert set(row["students"]) == {"a1.h0", "a1.h3"}


def test_merging_two_heads_into_one_costs_nothing() -> None:
    whole, split = split_networks()
    result = compare_networks(split, whole)
    assert result.alignment.value == pytest.approx(1, abs=2e-3)
    [row] = result.restructured(least=0.0).merges.to_dict("records")
    assert row["student"] == "a1.h0"
    assert set(row["teachers"]) == {"a1.h0", "a1.h3"}


def test_losing_a_head_costs_its_share() -> None:
    teacher = gpt2_of_heads(layers=1, seed=0)
    result = compare_networks(teacher, without_head(teacher, 0, 2))
    share = result.influences["teacher"].share()[2]
    assert share > 0.05
    assert result.alignment.value < 1 - share / 3
    assert "a0.h2" in result.restructuring.drops["teacher"].tolist()


def test_a_merge_of_exact_copies_costs_exactly_nothing() -> None:
    components, before, after = synthetic_pair(merged=True)
    result = recorded(components, components, before, after)
    assert result.alignment.value == pytest.approx(1, abs=1e-6)
    assert result.alignment.low == pytest.approx(1, abs=1e-6)
    [merge] = result.restructuring.merges.to_dict("records")
    assert merge["student"] == "a0.h0"
    assert merge["teachers"] == ("a0.h0", "a0.h2")
    assert merge["mass"] == pytest.approx(0.5)
    back = recorded(components, components, after, before)
    assert back.alignment.value == pytest.approx(1, abs=1e-6)
    [split] = back.restructuring.splits.to_dict("records")
    assert split["students"] == ("a0.h0", "a0.h2")


def test_a_head_that_the_student_lacks_is_a_drop() -> None:
    teacher = random_components(layers=1, heads=4, batches=(9, 7), seed=0)
    left = influence_of(teacher, effects_on(5, n1=-1, n4=-3))
    right = influence_of(teacher, effects_on(5, n4=-4))
    result = recorded(teacher, teacher, left, right)
    [drop] = result.restructuring.drops.to_dict("records")
    assert (drop["teacher"], drop["lost_fraction"]) == ("a0.h1", pytest.approx(1))
    assert result.alignment.value == pytest.approx(0.75, abs=1e-5)


def test_models_of_other_shapes_compare_and_the_papers_number_is_withheld() -> None:
    teacher = random_gpt2(layers=3, heads=4, width=32, seed=0)
    student = random_llama(layers=1, heads=2, kv_heads=1, width=16, seed=1)
    result = compare_networks(teacher, student)
    assert result.similarity.shape == result.plan.shape == (15, 3)
    assert 0 <= result.alignment.value <= 1
    assert result.paper_alignment is None
    assert any("needs models of one width" in warning for warning in result.warnings)
    assert result.to_json()["paper_alignment"] is None


def test_other_matchings_are_there_on_request() -> None:
    components, before, after = synthetic_pair(merged=True)
    result = recorded(components, components, before, after)
    assert len(result.matched("argmax")) == 2  # the student components that matter
    one = result.matched("one-to-one")
    assert one["teacher"].is_unique
    assert one["student"].is_unique
    pd.testing.assert_frame_equal(result.matched("transport"), result.matches)


# Warnings


def test_a_model_that_cannot_do_the_task_is_named_in_words() -> None:
    components, before, after = synthetic_pair(merged=False)
    failing = replace(after, clean=torch.linspace(-1, 1, 16), model="wreck")
    result = recorded(components, components, before, failing)
    assert not result.performance["student"].competent
    [warning] = [w for w in result.warnings if "wreck" in w]
    assert "does not do this task" in warning
    assert "in logits, no percentages" in warning
    assert not any("The teacher" in w for w in result.warnings)
    assert result.alignment.value == pytest.approx(1, abs=1e-6)  # shares exist all the same


def test_few_prompts_and_labelled_positions_are_warned_of() -> None:
    components, before, after = synthetic_pair(merged=False)
    few = recorded(components, components, before, after, positions="labelled")
    assert any("Only 16 prompts" in w for w in few.warnings)
    assert any("labelled positions only" in w for w in few.warnings)


def test_nothing_is_warned_of_without_reason() -> None:
    components = random_components(layers=1, heads=1, batches=(40,), positions=(2,), seed=0)
    influence = influence_of(components, torch.full((40, 2), -1.0))
    assert recorded(components, components, influence, influence).warnings == ()


# From a task to a saved result


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return (
        str(save_tiny_model(folder / "teacher", layers=2, heads=4, seed=0)),
        str(save_tiny_model(folder / "student", layers=1, heads=2, seed=1)),
    )


@pytest.fixture(scope="module")
def result(models) -> Comparison:
    return compare(models[0], models[1], "numerals", n=24, seed=3, draws=50, **FEW)


def test_the_result_says_what_it_was_made_with(result: Comparison, models) -> None:
    assert result.config["teacher"] == models[0]
    assert (result.config["n"], result.config["seed"], result.config["task"]) == (24, 3, "numerals")
    assert result.config["positions"] == "all"
    assert result.alignment.draws == 50
    assert "torch" in result.versions
    assert result.plan.to_numpy().sum() == pytest.approx(1)


def test_performance_is_that_of_the_clean_models(result: Comparison) -> None:
    clean = result.influences["student"].clean
    student = result.performance["student"]
    assert student.mean == pytest.approx(float(clean.mean()))
    assert student.accuracy == pytest.approx(float((clean > 0).float().mean()))
    assert student.low < student.mean < student.high
    assert student.accuracy_low <= student.accuracy <= student.accuracy_high


def test_json_has_exactly_the_documented_keys(result: Comparison) -> None:
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert set(data) == {
        "alignment",
        "paper_alignment",
        "alignments",
        "chance_similarity",
        "concentration",
        "teacher",
        "student",
        "matches",
        "merges",
        "splits",
        "drops",
        "robustness",
        "roles",
        "swaps",
        "warnings",
        "config",
        "versions",
    }
    assert set(data["alignment"]) == {
        "value",
        "low",
        "high",
        "method",
        "draws",
        "level",
        "null",
        "ceiling",
        "floor",
        "calibrated",
    }
    assert data["alignments"]["transport"] == data["alignment"]
    assert set(data["alignments"]) == {
        "transport",
        "signed transport",
        "weighted argmax",
        "paper",
    }
    assert set(data["teacher"]) == set(data["student"])
    assert set(data["student"]) == {
        "name",
        "metric_mean",
        "metric_low",
        "metric_high",
        "unit",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "competent",
    }
    assert isinstance(data["paper_alignment"], float)
    assert data["matches"][0]["mass"] == max(match["mass"] for match in data["matches"])


def test_merges_and_drops_are_plain_data() -> None:
    components, before, after = synthetic_pair(merged=True)
    data = recorded(components, components, before, after).to_json()
    assert json.loads(json.dumps(data["merges"]))[0]["teachers"] == ["a0.h0", "a0.h2"]


def test_it_reads_well(result: Comparison) -> None:
    text = repr(result)
    value = f"{result.alignment.value:.3f}"
    for expected in (
        "on numerals, 24 prompts, mean ablation",
        value,
        "strongest matches",
        "merges:",
    ):
        assert expected in text
    assert text.index("alignment: ") < text.index("the paper's number")


def test_what_was_saved_is_what_is_loaded(result: Comparison, tmp_path: Path) -> None:
    result.save(tmp_path / "run")
    again = load_comparison(tmp_path / "run")
    assert again.to_json() == result.to_json()
    assert repr(again) == repr(result)
    assert again.alignment == result.alignment
    assert again.paper_alignment == result.paper_alignment
    assert again.warnings == result.warnings
    for table in ("similarity", "paper_similarity", "plan", "matches"):
        pd.testing.assert_frame_equal(getattr(again, table), getattr(result, table))
    for side in ("teacher", "student"):
        torch.testing.assert_close(
            again.influences[side].effects, result.influences[side].effects, rtol=0, atol=0
        )
    assert not list((tmp_path / "run").glob("*.p*kl"))


def test_a_result_without_the_papers_number_can_be_saved(tmp_path: Path) -> None:
    result = compare_networks(random_gpt2(layers=1, width=32), random_gpt2(layers=1, width=16))
    result.save(tmp_path)
    again = load_comparison(tmp_path)
    assert again.paper_alignment is None
    assert again.paper_similarity is None


@pytest.mark.parametrize("damage", ["nothing there", "no numbers", "not JSON", "another schema"])
def test_a_missing_or_damaged_result_is_refused_in_words(
    result: Comparison, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    if damage != "nothing there":
        result.save(folder)
    if damage == "no numbers":
        (folder / "comparison.safetensors").write_bytes(b"")
    if damage == "not JSON":
        (folder / "comparison.json").write_text("{")
    if damage == "another schema":
        (folder / "comparison.json").write_text("{}")
    with pytest.raises(InputError, match="run"):
        load_comparison(folder)


def test_the_package_is_the_function_and_a_seed_fixes_the_numbers(models, result) -> None:
    again = ckd.compare(
        models[0], models[1], ckd.load_task("numerals"), n=24, seed=3, draws=50, **FEW
    )
    assert again.to_json() == result.to_json()
    other = compare(models[0], models[1], "numerals", n=24, seed=4, draws=0, null_draws=0)
    assert other.alignment.value != result.alignment.value


def test_a_comparison_goes_on_from_its_checkpoint(models, result: Comparison) -> None:
    memory = MemoryCheckpoint()
    stages: list[str] = []

    def stop_in_the_student(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage.startswith("Ablating") and "student" in stage:
            raise KeyboardInterrupt

    again = partial(
        compare, models[0], models[1], "numerals", n=24, seed=3, draws=50, checkpoint=memory, **FEW
    )
    with pytest.raises(KeyboardInterrupt):
        again(progress=stop_in_the_student)
    assert any(key.startswith("teacher/") for key in memory.parts)
    assert again().to_json() == result.to_json()


def test_preset_paper_takes_the_papers_settings(models) -> None:
    last: dict[str, tuple[int, int]] = {}
    result = compare(
        load_model(models[0]),
        models[1],
        "ioi",
        n=8,
        draws=5,
        preset="paper",
        **FEW,
        progress=lambda stage, done, total: last.update({stage: (done, total)}),
    )
    assert result.config["processed"]
    assert result.config["bos"] == "none"
    assert any("cannot fold" in warning for warning in result.warnings)  # the loaded teacher
    assert result.paper_similarity is not None
    matched = result.matches.set_index("student")["similarity"]
    for student in result.similarity.columns:
        assert matched[student] == pytest.approx(result.paper_similarity[student].max())
    text = repr(result)
    assert text.index("the paper's number") < text.index("alignment: ")
    assert {"Comparing heads", "Comparing mlps", "Weighing the evidence"} <= set(last)
    assert all(done == total for done, total in last.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 7}, "n=7 is too few"),
        ({"ablation": "median"}, "choose one of mean, zero, resample"),
        ({"preset": "mine"}, "choose one of default, paper"),
        ({"measure": "qk_circuit"}, "choose one of default, cka"),
        ({"draws": -1}, "cannot be negative"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(arguments, message) -> None:
    with pytest.raises(InputError, match=message):
        compare("no such model", "nor this", "ioi", **arguments)


def test_an_unknown_task_is_refused_before_models_are_loaded() -> None:
    with pytest.raises(TaskError, match="numeralz"):
        compare("no such model", "nor this", "numeralz")
