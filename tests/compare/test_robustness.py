"""Perturbed inputs: noise by hooks, tables by hand, and the whole of ``robustness``."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from architectures.networks import network
from prompt_samples import naming_task
from random_models import FAMILIES, random_bridge, random_gpt2, random_prompts
from tiny import word_tokenizer
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.compare import robustness as module
from circuitkd.compare._robustness_inputs import answers, embedding_rms
from circuitkd.compare.robustness import (
    Condition,
    Robustness,
    load_robustness,
    parameter_count,
    robustness,
)
from circuitkd.errors import InputError, RunError, VocabularyError
from circuitkd.metrics import logit_difference, probability_difference
from circuitkd.models import load_model
from circuitkd.prompts import Prompts
from circuitkd.runs import MemoryCheckpoint
from circuitkd.tasks import Task


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_hugging_face_counts_them(family: str) -> None:
    """Once each: the wrapped network holds GPT-2's Q, K and V twice, and tied embeddings once."""
    network = FAMILIES[family]()
    assert parameter_count(load_model(network)) == network.num_parameters()


def noisy_metric(model, prompts: Prompts, strength: float, seed: int) -> torch.Tensor:
    """The slow way: one prompt at a time, the noise added by a hook in front of block 0."""
    first = 0 if prompts.bos is None else 1
    words = torch.cat([group.clean[:, first:].flatten() for group in prompts.groups])
    size = strength * float(model.W_E[words].double().square().mean().sqrt())
    values = torch.zeros(len(prompts))
    for group in prompts.groups:
        for row, place in enumerate(group.index.tolist()):
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(place,)))
            shape = (group.clean.shape[1], model.cfg.d_model)
            noise = size * rng.standard_normal(shape, dtype=np.float32)
            noise[:first] = 0

            def add(stream, hook, noise=noise):
                return stream + torch.from_numpy(noise)

            with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.0.hook_in", add)]):
                logits = model(group.clean[row : row + 1])[:, -1]
            if prompts.metric == "logit_difference":
                answer = group.correct[row : row + 1], group.incorrect[row : row + 1]
                values[place] = logit_difference(logits, *answer)[0]
            else:
                assert group.candidates is not None
                assert group.valid is not None
                values[place] = probability_difference(
                    logits, group.candidates, group.valid[row : row + 1]
                )[0]
    return values


class TestNoise:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("metric", ["logit_difference", "probability_difference"])
    @pytest.mark.parametrize("bos", [False, True])
    def test_equals_a_hook_that_adds_it(self, family: str, metric: str, bos: bool) -> None:
        model = random_bridge(family)
        prompts = random_prompts(bos=bos, metric=metric)
        found = answers(model, prompts, noise=(0.0, 0.7), seed=5)
        for number, strength in enumerate((0.0, 0.7)):
            slow = noisy_metric(model, prompts, strength, seed=5)
            torch.testing.assert_close(found.metric[number], slow, atol=1e-4, rtol=0)
        assert (found.metric[0] - found.metric[1]).abs().max() > 1e-2

    def test_a_model_of_one_layer(self) -> None:
        model, prompts = random_bridge("gpt2", layers=1), random_prompts()
        slow = noisy_metric(model, prompts, 0.5, seed=0)
        found = answers(model, prompts, noise=(0.5,)).metric[0]
        torch.testing.assert_close(found, slow, atol=1e-4, rtol=0)

    def test_the_likeliest_token_is_that_of_the_logits(self) -> None:
        model, prompts = random_bridge("llama"), random_prompts()
        found = answers(model, prompts)
        for group in prompts.groups:
            with torch.no_grad():
                top = model(group.clean)[:, -1].argmax(-1)
            assert (found.top[0, group.index] == top).all()

    def test_batch_size_and_other_prompts_change_nothing(self) -> None:
        model, prompts = random_bridge("gpt2"), random_prompts()
        whole = answers(model, prompts, noise=(0.5,), seed=1).metric
        single = answers(model, prompts, noise=(0.5,), seed=1, batch_size=1).metric
        fewer = random_prompts(batches=(5, 3)).take(range(4))
        # The relative size depends on which tokens the prompts hold, so only it is put right.
        rms = embedding_rms(model, prompts) / embedding_rms(model, fewer)
        part = answers(model, fewer, noise=(0.5 * rms,), seed=1).metric
        torch.testing.assert_close(single, whole, atol=1e-4, rtol=0)
        torch.testing.assert_close(part, whole[:, :4], atol=1e-4, rtol=0)

    @pytest.mark.parametrize("name", ["gemma", "bert", "llama"])
    def test_noise_is_as_long_as_what_enters_the_first_block(self, name: str) -> None:
        model, prompts = load_model(network(name)), random_prompts((6,), (4,))
        with torch.no_grad():
            _, cache = model.run_with_cache(prompts.groups[0].clean)
        entering = cache["blocks.0.hook_in"].square().mean().sqrt()
        assert embedding_rms(model, prompts) == pytest.approx(float(entering), rel=1e-5)

    def test_the_seed_matters_and_is_all_that_does(self) -> None:
        model, prompts = random_bridge("gpt2"), random_prompts()
        one, again, other = (
            answers(model, prompts, noise=(0.5,), seed=seed).metric for seed in (0, 0, 1)
        )
        assert torch.equal(one, again)
        assert (one - other).abs().max() > 1e-2

    def test_nan_is_told(self) -> None:
        model, prompts = random_bridge("gpt2"), random_prompts()
        with pytest.raises(RunError, match="NaN"):
            answers(model, prompts, noise=(float("inf"),))


def by_hand(
    teacher: list[list[float]], student: list[list[float]], kinds: str = "cvn", **changes: object
) -> Robustness:
    """A result from metrics [condition, prompt]; a condition is clean, a variant or noise."""
    made = {"c": module.CLEAN, "v": Condition("variant", "typos"), "n": Condition.noise(0.5)}
    fields: dict[str, object] = {
        "task": "numerals",
        "metric": "logit_difference",
        "conditions": tuple(made[kind] for kind in kinds),
        "metrics": {"teacher": torch.tensor(teacher), "student": torch.tensor(student)},
        "tops": {
            "teacher": torch.zeros(len(teacher), len(teacher[0]), dtype=torch.int64),
            "student": (torch.tensor(student) <= 0).long(),
        },
        "influences": None,
        "parameters": {"teacher": 100, "student": 60},
        "warnings": (),
        "config": {"teacher": "big", "student": "small", "n": len(teacher[0]), "noise": [0.5]},
        "versions": {},
    }
    return Robustness(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


TEACHER = [[4.0, 2, 4, 2], [1.0, 1, 1, -1], [2.0, 1, 2, 1]]
STUDENT = [[2.0, 1, 2, 1], [1.0, -1, 1, -1], [-2.0, -1, -2, -1]]


class TestFrames:
    def test_accuracy_metric_and_what_is_retained(self) -> None:
        frame = by_hand(TEACHER, STUDENT).frame.set_index(["side", "condition"])
        assert frame.loc["teacher", "accuracy"].tolist() == [1, 0.75, 1]
        assert frame.loc["student", "accuracy"].tolist() == [1, 0.5, 0]
        assert frame.loc["teacher", "metric"].tolist() == [3, 0.5, 1.5]
        assert frame.loc["teacher", "retained_pct"].tolist() == pytest.approx([100, 100 / 6, 50])
        assert frame.loc["student", "retained_pct"].tolist() == pytest.approx([100, 0, -100])
        # Wilson, by the formula, for 2 of 4.
        z = 1.959964
        centre, half = 0.5, z * np.sqrt(0.25 / 4 + z**2 / 64) / (1 + z**2 / 4)
        row = frame.loc[("student", "typos")]
        found = [row["accuracy_low"], row["accuracy_high"]]
        assert found == pytest.approx([centre - half, centre + half], abs=1e-5)

    def test_noise_is_resampled_with_the_clean_prompts_and_a_variant_is_not(self) -> None:
        """On every prompt half of the clean metric is retained, which no resampling changes."""
        frame = by_hand(TEACHER, STUDENT).frame.set_index(["side", "condition"])
        noise = frame.loc[("teacher", "noise 0.5"), ["retained_low", "retained_high"]]
        assert noise.tolist() == pytest.approx([50, 50])
        halved = [TEACHER[0], TEACHER[2]]
        variant = by_hand(halved, halved, "cv").frame.set_index(["side", "condition"])
        row = variant.loc[("teacher", "typos")]
        assert row["retained_low"] < 45
        assert row["retained_high"] > 55

    def test_agreement_by_hand(self) -> None:
        table = by_hand(TEACHER, STUDENT).agreement.set_index("condition")
        assert table["agreement"].tolist() == [1, 0.75, 0]
        assert table["expected"].tolist() == pytest.approx([1, 0.75 * 0.5 + 0.25 * 0.5, 0])
        assert table["same_token"].tolist() == [1, 0.5, 0]
        assert table["gap_pct"].tolist() == pytest.approx([0, -100 / 6, -150])
        assert table.loc["noise 0.5", ["gap_low", "gap_high"]].tolist() == pytest.approx(
            [-150, -150]
        )

    def test_a_weak_baseline_has_no_percentages(self) -> None:
        result = by_hand(TEACHER, [[-1.0, 1, -1, 1], *STUDENT[1:]])
        frame = result.frame.set_index("side")
        assert frame.loc["student", "retained_pct"].isna().all()
        assert frame.loc["student", "metric"].notna().all()
        assert frame.loc["teacher", "retained_pct"].notna().all()
        assert result.agreement["gap_pct"].isna().all()
        assert "small does not do this task" in result.competence_notes()[0]
        json.dumps(result.to_json(), allow_nan=False)

    def test_different_vocabularies_have_no_common_token(self) -> None:
        table = by_hand(TEACHER, STUDENT, tops=None).agreement
        assert table["same_token"].isna().all()
        assert table["agreement"].notna().all()

    def test_strength_is_a_number_for_noise_only(self) -> None:
        strengths = by_hand(TEACHER, STUDENT).agreement["strength"]
        assert strengths[0] == 0
        assert np.isnan(strengths[1])
        assert strengths[2] == 0.5


UNSEEN = ["Hugo", "Emil", "Ida", "Ann", "Ben", "Carl", "Dora", "Fred", "Gina"]
TASK = naming_task(
    variants={
        "typos": {"description": "misspelt", "replace": {"smiled": "simled"}},
        "unseen_words": {
            "description": "others",
            "words": {"names": UNSEEN},
        },
    }
)
WITHOUT_TYPOS = TASK.model_copy(
    update={"variants": {"unseen_words": TASK.variants["unseen_words"]}}
)
Models = Mapping[str, TransformerBridge]


def small_model(task: Task = TASK, **sizes: int) -> TransformerBridge:
    """A random model that knows the words of ``task`` and its variants."""
    tokenizer = word_tokenizer([task])
    return load_model(random_gpt2(vocabulary=len(tokenizer), **sizes), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def models() -> Models:
    return {"teacher": small_model(), "student": small_model(layers=1, seed=1)}


def run(models: Models, **options: object) -> Robustness:
    chosen = {"n": 8, "variants": ["typos"], "noise": [0.5], "ablation": None, **options}
    return robustness(models["teacher"], models["student"], TASK, **chosen)  # pyright: ignore


class TestRobustness:
    def test_a_model_agrees_with_itself_under_every_condition(self, models: Models) -> None:
        both = {"teacher": models["teacher"], "student": models["teacher"]}
        result = run(both, ablation="mean", variants=None)
        assert (result.agreement["agreement"] == 1).all()
        assert (result.agreement["same_token"] == 1).all()
        frame = result.frame.drop(columns="side")
        half = len(frame) // 2
        left, right = frame.iloc[:half], frame.iloc[half:].reset_index(drop=True)
        pd.testing.assert_frame_equal(left, right)
        assert result.brittleness is not None
        assert (result.brittleness.frame["difference"].dropna() == 0).all()

    def test_each_condition_is_measured_on_its_own_prompts(self, models: Models) -> None:
        result = run(models, variants=["unseen_words", "typos"], noise=[0.5, 1.0], seed=3)
        names = ["clean", "unseen_words", "typos", "noise 0.5", "noise 1"]
        assert [condition.name for condition in result.conditions] == names
        for place, (variant, strength) in enumerate(
            [(None, 0.0), ("unseen_words", 0.0), ("typos", 0.0), (None, 0.5), (None, 1.0)]
        ):
            pair = TASK.sample_pair(*models.values(), n=8, seed=3, variant=variant)
            for (side, model), prompts in zip(models.items(), pair, strict=True):
                slow = noisy_metric(model, prompts, strength, seed=3)
                torch.testing.assert_close(result.metrics[side][place], slow, atol=1e-4, rtol=0)

    def test_by_default_all_variants(self, models: Models) -> None:
        result = run(models, variants=None)
        assert [condition.name for condition in result.conditions[1:-1]] == [*TASK.variants]

    def test_a_variant_that_cannot_be_posed_is_left_out_unless_it_is_asked_for(
        self, models: Models
    ) -> None:
        both = {**models, "student": small_model(WITHOUT_TYPOS, layers=1)}
        result = run(both, variants=None)
        assert [condition.name for condition in result.conditions[1:-1]] == ["unseen_words"]
        assert any(note.startswith("The variant typos is left out") for note in result.warnings)
        with pytest.raises(VocabularyError):
            run(both, variants=["typos"])

    def test_influences_that_are_known_are_not_measured_again(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = run(models, ablation="zero")
        monkeypatch.setattr(module, "node_influence", None)
        again = run(models, influences=first.influences)
        assert repr(again.brittleness) == repr(first.brittleness)
        assert again.config["ablation"] == "zero"

    def test_different_vocabularies_and_widths_are_told(self, models: Models) -> None:
        other = run({**models, "student": small_model(naming_task(), layers=1)}, variants=[])
        assert other.tops is None
        wide = run({**models, "student": small_model(width=48)})
        assert wide.tops is not None
        told = [any("differ in width" in note for note in own.warnings) for own in (other, wide)]
        assert told == [False, True]

    def test_an_interrupted_call_goes_on(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = MemoryCheckpoint()
        whole = run(models, ablation="mean", checkpoint=memory)
        monkeypatch.setattr(module, "answers", None)
        again = run(models, ablation="mean", checkpoint=memory)
        assert repr(again) == repr(whole)

    def test_what_is_saved_is_what_is_loaded(self, models: Models, tmp_path: Path) -> None:
        full = run(models, ablation="mean")
        for name, result in (("full", full), ("bare", replace(full, tops=None, influences=None))):
            result.save(tmp_path / name)
            again = load_robustness(tmp_path / name)
            assert repr(again) == repr(result)
            assert again.to_json() == result.to_json()
            assert (again.tops is None) is (name == "bare")
        (tmp_path / "full" / "robustness.safetensors").unlink()
        with pytest.raises(InputError, match="cannot be read"):
            load_robustness(tmp_path / "full")

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"n": 3}, "too few"),
            ({"ablation": "magic"}, "magic"),
            ({"noise": [0.0]}, "greater than 0"),
            ({"noise": [0.5, 0.5]}, "once"),
            ({"variants": ["nonsense"]}, "nonsense"),
            ({"influences": {}}, "'teacher' and 'student'"),
        ],
    )
    def test_wrong_arguments(self, wrong: dict[str, object], words: str) -> None:
        """Before any model is loaded: there is none of these names."""
        chosen = {"ablation": None, **wrong}
        with pytest.raises(InputError, match=words):
            robustness("no-such-model", "none", "numerals", **chosen)  # pyright: ignore


def test_the_bundled_student_is_more_brittle_a_component_but_not_in_all() -> None:
    """It has half the components, so each matters twice as much."""
    result = robustness("tiny-teacher", "tiny-student", "weekdays", n=32, variants=[], noise=[])
    assert result.brittleness is not None
    rows = result.brittleness.frame
    assert rows.loc["mean_drop_pct", "prompts_low"] > 5
    assert rows.loc["total_drop_pct", "prompts_low"] < 0
