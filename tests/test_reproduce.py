"""Measuring a record again: what is measured, and when it agrees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_records
import pytest
import torch
from fake_records import BECAUSE, CIRCUIT, PROMPTS, Json
from slow_ablation import slow_metric

import circuitkd as ckd
from circuitkd.compare.robustness import brittleness_of
from circuitkd.errors import InputError
from circuitkd.models import component_nodes_of
from circuitkd.nodes import Node
from circuitkd.recorded.bench import Bench
from circuitkd.recorded.measured import Measured, pooled
from circuitkd.recorded.reproduction import Compared, Reproduction, reproduce
from circuitkd.recorded.schema import DATA_DIRECTORY, Line, Record, shipped_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Reproduction:
    return reproduce(fake_records.write(fake_records.one_model(), folder))


@pytest.fixture(scope="module")
def pair(folder: Path) -> Reproduction:
    return reproduce(fake_records.write(fake_records.two_models(), folder))


@pytest.fixture(scope="module")
def student() -> tuple[Any, Any]:
    """The student as it is measured, and the prompts that it is measured on."""
    model = ckd.load_model("tiny-student", processed=True)
    prompts = ckd.load_task(DATA_DIRECTORY / "numerals.yaml").sample(model, PROMPTS, bos="none")
    return model, pooled([prompts])[0]


def value_of(result: Reproduction, quantity: str, **about: str) -> float:
    found = [
        each.measured.value
        for each in result.lines
        if each.line.quantity == quantity
        and all(getattr(each.line, name) == value for name, value in about.items())
    ]
    return found[0]


# ---------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("make", [fake_records.one_model, fake_records.two_models])
def test_what_is_measured_agrees_with_itself_and_differs_where_it_is_off(
    make: Callable[[], Json], folder: Path, request: pytest.FixtureRequest
) -> None:
    first = request.getfixturevalue("alone" if make is fake_records.one_model else "pair")
    assert {each.verdict for each in first.lines if each.line.reason is None} == {"differs"}
    record: Json = {**make(), "name": "known"}
    off = [dict(line) for line in record["lines"]]
    for line, shifted, each in zip(record["lines"], off, first.lines, strict=True):
        high = each.measured.high
        line["recorded"] = each.measured.value
        shifted["recorded"] = (each.measured.value if high is None else high) + 0.002
    record["lines"] += off
    second = reproduce(fake_records.write(record, folder))
    expected = [
        verdict if line["reason"] is None else "not reproducible"
        for verdict in ("agrees", "differs")
        for line in (each.line.model_dump() for each in first.lines)
    ]
    assert [each.verdict for each in second.lines] == expected
    # The same seed gives the same numbers, whatever was recorded.
    numbers = [each.measured for each in first.lines]
    assert [each.measured for each in second.lines] == numbers * 2


@pytest.mark.parametrize(
    ("measured", "tolerance", "verdict"),
    [
        (Measured(9.0), 1.0, "agrees"),
        (Measured(9.0), 0.9, "differs"),
        (Measured(8.0, 7.0, 9.5), 0.5, "agrees"),
        (Measured(8.0, 7.0, 9.4), 0.5, "differs"),
        (Measured(13.0, 11.0, 14.0), 1.0, "agrees"),
        (Measured(13.0, 11.1, 14.0), 1.0, "differs"),
        (Measured(11.0, 12.0, 14.0), 1.0, "agrees"),  # an interval need not hold its value
        (Measured.none("it rained"), 1e9, "not reproducible"),
    ],
)
def test_a_number_agrees_within_its_tolerance_of_the_interval(
    measured: Measured, tolerance: float, verdict: str
) -> None:
    line = Line(quantity="paper_alignment", recorded=10.0, tolerance=tolerance)
    compared = Compared(line, measured)
    assert compared.verdict == verdict
    assert compared.because == measured.missing


def test_what_cannot_be_reproduced_says_why_and_is_measured_beside(alone: Reproduction) -> None:
    each = alone.lines[-1]
    assert (each.verdict, each.because) == ("not reproducible", BECAUSE)
    assert each.measured == alone.lines[1].measured


def test_nodes_that_a_model_lacks_are_named_and_the_rest_is_measured() -> None:
    result = reproduce("distilgpt2-numerals", models={"model": "tiny-student"}, n=8)
    missing = {each.because for each in result.lines} - {None}
    assert "tiny-student has no head 2.4" in missing
    assert all(str(reason).startswith("tiny-student has no ") for reason in missing)
    assert result.counts["agrees"] + result.counts["differs"] > 5


def test_percentages_of_a_model_that_fails_the_task_are_withheld() -> None:
    from circuitkd.models import reinitialised

    model = reinitialised(ckd.load_model("tiny-student"), seed=0)
    result = reproduce("lan-months", models={"model": model}, n=16)
    assert [each.verdict for each in result.lines] == ["not reproducible"] * 3
    assert "does not do this task" in str(result.lines[0].because)


# ---------------------------------------------------------------------- what is measured


def test_single_ablations_equal_a_plain_hooked_run(
    alone: Reproduction, student: tuple[Any, Any]
) -> None:
    model, prompts = student
    nodes = component_nodes_of(model)
    clean = slow_metric(model, prompts, nodes, "mean").mean()
    assert value_of(alone, "clean") == pytest.approx(float(clean), abs=1e-4)
    for name in ("a0.h1", "m1"):
        rest = [node for node in nodes if node.name != name]
        retained = 100 * slow_metric(model, prompts, rest, "mean").mean() / clean
        assert value_of(alone, "retained_pct", node=name) == pytest.approx(
            float(retained), abs=0.01
        )


def test_circuits_equal_a_plain_hooked_run(alone: Reproduction, student: tuple[Any, Any]) -> None:
    model, prompts = student
    clean = slow_metric(model, prompts, component_nodes_of(model), "mean").mean()
    kept = [Node.parse(name) for name in CIRCUIT]
    retained = 100 * slow_metric(model, prompts, kept, "mean").mean() / clean
    assert value_of(alone, "circuit_retained_pct") == pytest.approx(float(retained), abs=0.01)
    kept.remove(Node.parse("a0.h1"))
    retained = 100 * slow_metric(model, prompts, kept, "mean").mean() / clean
    assert value_of(alone, "leave_one_out_pct") == pytest.approx(float(retained), abs=0.01)


def test_pruning_and_mean_change_are_those_of_the_library(
    alone: Reproduction, student: tuple[Any, Any]
) -> None:
    model, prompts = student
    circuit = ckd.prune_nodes(model, prompts, 0.2)
    kinds = [node.kind for node in circuit.nodes]
    assert value_of(alone, "pruned_heads") == kinds.count("head")
    assert value_of(alone, "pruned_mlps") == kinds.count("mlp")
    assert value_of(alone, "pruned_retained_pct") == pytest.approx(
        circuit.provenance["retained_pct"], abs=1e-3
    )
    names = {node.name for node in circuit.nodes}
    overlap = 100 * len(names & set(CIRCUIT)) / len(names | set(CIRCUIT))
    assert value_of(alone, "pruned_overlap_pct") == pytest.approx(overlap)
    frame = ckd.node_influence(model, prompts).frame
    drops = frame.loc[frame["kind"] == "head", "drop_pct"]
    assert value_of(alone, "mean_change_pct") == pytest.approx(-drops.clip(lower=0).mean())


def test_the_threshold_of_the_record_is_pruned_to(folder: Path, student: tuple[Any, Any]) -> None:
    record = fake_records.one_model() | {"name": "loose", "threshold": 0.6}
    found = reproduce(fake_records.write(record, folder))
    loose = ckd.prune_nodes(*student, 0.6)
    assert value_of(found, "pruned_retained_pct") == pytest.approx(
        loose.provenance["retained_pct"], abs=1e-3
    )
    assert value_of(found, "pruned_retained_pct") < 80


def test_a_pair_is_measured_as_compare_and_robustness_measure_it(pair: Reproduction) -> None:
    models = [ckd.load_model(name, processed=True) for name in ("tiny-teacher", "tiny-student")]
    both = ckd.load_task("ioi").sample_pair(models[0], models[1], PROMPTS, bos="none")
    prompts = pooled(both)
    teacher, student = (
        ckd.node_influence(model, own, ablation="zero")
        for model, own in zip(models, prompts, strict=True)
    )
    parameters = {"teacher": 3_000_000, "student": 531_200}
    found = brittleness_of({"teacher": teacher, "student": student}, parameters)
    statistics = found.student.statistics["value"]
    assert value_of(pair, "mean_drop_pct", side="teacher") == pytest.approx(found.teacher.mean_drop)
    for name in ("severity", "gini"):
        assert value_of(pair, name, side="student") == pytest.approx(statistics[name])
    difference = value_of(pair, "mean_drop_pct", side="difference")
    expected: Any = found.frame["components_mean"]["mean_drop_pct"]
    assert difference == pytest.approx(float(expected), abs=1e-3)
    # tiny-teacher has 1,067,008 parameters, tiny-student 531,200
    compression = 1 - 531_200 / ckd_parameters(models[0])
    assert value_of(pair, "mean_drop_pct", side="per_tenth") == pytest.approx(
        difference / compression / 10
    )


def ckd_parameters(model: Any) -> int:
    """Parameters of a GPT-2 with tied embeddings, counted by its sizes."""
    config = model.original_model.config
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    block = 4 * width + 4 * width * (width + 1) + width * inner * 2 + inner + width
    embeddings = (config.vocab_size + config.n_positions) * width
    return embeddings + config.n_layer * block + 2 * width


def test_similarity_and_alignment_are_those_of_the_papers_preset() -> None:
    """On one template nothing is pooled, so that the whole pipeline of ``compare`` applies."""
    record = fake_records.two_models() | {"ablation": "mean", "task": "weekdays"}
    task = ckd.load_task("weekdays")
    task = task.model_copy(update={"templates": task.templates[:1]})
    models = {s: ckd.load_model(f"tiny-{s}", processed=True) for s in ("teacher", "student")}
    pairs = task.sample_pair(models["teacher"], models["student"], PROMPTS, bos="none")
    bench = Bench(Record.model_validate(record), models, dict(zip(models, pairs, strict=True)))
    expected = ckd.compare(
        models["teacher"], models["student"], task, n=PROMPTS, preset="paper", null_draws=0
    )
    assert expected.paper_alignment is not None
    assert expected.paper_similarity is not None
    line = Line(quantity="paper_alignment", recorded=0, tolerance=0)
    assert bench.measure(line).value == pytest.approx(expected.paper_alignment.value, abs=1e-6)
    line = Line(quantity="head_similarity", recorded=0, tolerance=0, node="a0.h1", match="a1.h2")
    similarity = expected.paper_similarity.loc["a0.h1", "a1.h2"]
    assert bench.measure(line).value == pytest.approx(similarity, abs=1e-6)


def test_profiles_are_correlated_over_all_nodes(student: tuple[Any, Any]) -> None:
    model, prompts = student
    frame = ckd.node_influence(model, prompts).frame
    profile = dict(zip(frame["node"], 100 - frame["drop_pct"], strict=True))
    base = fake_records.one_model()
    line = Line(quantity="profile_correlation", recorded=1, tolerance=0, side="model")

    def correlation(profile: dict[str, float]) -> Measured:
        record = Record.model_validate(base | {"profiles": {"model": profile}})
        return Bench(record, {"model": model}, {"model": prompts}).measure(line)

    assert correlation(profile).value == pytest.approx(1.0)
    assert correlation({name: -value for name, value in profile.items()}).value < -0.99
    del profile["m0"]
    assert correlation(profile).missing == "the record does not cover all of tiny-student"


def test_prompts_are_pooled_over_templates_and_keep_their_order() -> None:
    models = [ckd.load_model(name) for name in ("tiny-teacher", "tiny-student")]
    sides = ckd.load_task("numerals").sample_pair(models[0], models[1], 80)
    joined = pooled(sides)
    for before, after in zip(sides, joined, strict=True):
        assert len(before.groups) == 6
        assert len(after.groups) == 1
        assert after.texts == before.texts
        assert after.corrupted_texts == before.corrupted_texts
        [group] = after.groups
        assert torch.equal(group.means, group.corrupted)
        both = zip(before.groups, after.groups * 6, strict=True)
        assert all(own.template == place for place, (own, _) in enumerate(both))
    few = pooled([sides[0].take(range(8))])[0].groups[0]
    assert len(few.means) >= 64


def test_prompts_of_unequal_length_stay_apart() -> None:
    prompts = ckd.load_task("ioi").sample(ckd.load_model("tiny-teacher"), 40)
    shapes = {
        (group.clean.shape[1], *((label, int(at[0])) for label, at in group.positions.items()))
        for group in prompts.groups
    }
    joined = pooled([prompts])[0]
    assert 1 < len(joined.groups) == len(shapes)
    assert joined.texts == prompts.texts


# ---------------------------------------------------------------------- arguments and results


def test_a_result_is_saved_and_loaded(alone: Reproduction, tmp_path: Path) -> None:
    alone.save(tmp_path / "result.json")
    loaded = Reproduction.load(tmp_path / "result.json")
    assert loaded.to_json() == alone.to_json()
    assert list(loaded.frame["verdict"]) == [each.verdict for each in alone.lines]
    assert loaded.config["models"] == {"model": "tiny-student"}
    assert loaded.config["prompts"] == PROMPTS
    assert "fake-numerals: " in repr(loaded)


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "none.json"):
        with pytest.raises(InputError, match=name):
            Reproduction.load(tmp_path / name)


def test_wrong_arguments_are_refused_before_any_work() -> None:
    with pytest.raises(InputError, match="it has no student to replace"):
        reproduce("gpt2-numerals", models={"student": "tiny-student"})
    with pytest.raises(InputError, match="take at least 8"):
        reproduce("gpt2-numerals", models={"model": "tiny-student"}, n=4)
    with pytest.raises(InputError, match="Did you mean 'robustness'"):
        reproduce("robustnes")


def test_no_weights_is_the_clear_error_of_load_model() -> None:
    with pytest.raises(ckd.CircuitKDError, match=r"The model hub cannot be reached, so 'gpt2'"):
        reproduce("gpt2-numerals")


def test_nothing_is_measured_where_there_is_nothing_to_measure_on() -> None:
    result = reproduce("qa")
    assert result.counts == {"agrees": 0, "differs": 0, "not reproducible": 3}
    assert {each.measured.missing for each in result.lines} == {"there is nothing to measure it on"}
    assert result.config["models"] == {}


def test_published_formulas_on_published_values_give_published_numbers() -> None:
    result = reproduce("arithmetic")
    assert result.counts == {"agrees": 9, "differs": 0, "not reproducible": 0}
    assert value_of(result, "mean_drop_pct", side="student") == pytest.approx(12.24012646, abs=1e-8)
    assert value_of(result, "paper_alignment") == pytest.approx(0.900507880403726, abs=1e-12)
    low, high = result.lines[0].measured.low, result.lines[0].measured.high
    assert (low, high) == pytest.approx((1.70965797, 4.66008888), abs=1e-8)
    assert shipped_record("arithmetic").task is None
