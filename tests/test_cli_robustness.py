"""``circuitkd robustness``: what it prints, saves and refuses."""

import json
from pathlib import Path

import pytest
from test_cli import MEETINGS, NAMES, assert_refused, call, save_model_with
from test_cli_interrupts import parts_in, stop_by
from typer.testing import Result

from circuitkd._cli_run import ABLATIONS
from circuitkd.compare.robustness import NOISE, load_robustness, robustness

Arguments = tuple[str | Path, ...]


@pytest.fixture(scope="module")
def bundled() -> Arguments:
    """The bundled pair on few prompts, one variant and one size of noise."""
    return ("--task", "weekdays", "-n", "8", "--variant", "typos", "--noise", "0.5")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Arguments:
    """Two random models, and a task file whose words they know."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "meetings.yaml").write_text(MEETINGS)
    teacher = save_model_with(folder / "teacher", NAMES)
    student = save_model_with(folder / "student", NAMES, layers=1, seed=1)
    models: Arguments = ("--teacher", teacher, "--student", student)
    return (*models, "--task", folder / "meetings.yaml", "-n", "8")


def answer(result: Result) -> dict:
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


def test_json_is_what_the_library_measures(small: Arguments) -> None:
    found = answer(call("robustness", *small, "--noise", "0.5", "--json"))
    teacher, student, task = (small[place] for place in (1, 3, 5))
    result = robustness(teacher, student, task, n=8, noise=[0.5])
    expected = json.loads(json.dumps(result.to_json()))
    assert found.keys() == expected.keys()
    for key in ("behaviour", "agreement"):
        assert len(found[key]) == len(expected[key]) > 0
        for row, wanted in zip(found[key], expected[key], strict=True):
            assert row == {
                name: pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
                for name, value in wanted.items()
            }
    rows = {row["statistic"]: row for row in found["brittleness"]["difference"]}
    assert result.brittleness is not None
    drop = result.brittleness.frame.loc["mean_drop", "difference"]
    assert rows["mean_drop"]["difference"] == pytest.approx(drop, abs=1e-4)
    for key in ("parameters", "config", "competent", "warnings", "versions"):
        assert found[key] == expected[key]


def test_the_tables_have_units_and_intervals_and_fit_a_terminal(bundled: Arguments) -> None:
    result = call("robustness", *bundled)
    assert result.exit_code == 0, result.stderr
    for word in ("right answers (%)", "logit difference (logits)", "typos", "noise 0.5", "clean",
                 "same answer", "mean drop (%)", "total drop (%)", "severity (%)",
                 "mean drop (logits)", "fewer parameters", "95 %"):  # fmt: skip
        assert word in " ".join(result.stdout.split()), word
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    # A condition or statistic is one line: nothing is folded.
    for label in ("clean", "typos", "noise 0.5"):
        assert sum(line.startswith(label) for line in result.stdout.splitlines()) == 2


def test_by_default_all_variants_and_sizes_of_noise(small: Arguments) -> None:
    found = answer(call("robustness", *small, "--json", "--ablation", "none"))
    assert found["config"]["variants"] == ["loud"]
    assert found["config"]["noise"] == [*NOISE]
    assert found["brittleness"] is None


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_runs(small: Arguments, ablation: str) -> None:
    found = answer(call("robustness", *small, "--ablation", ablation, "--json"))
    assert found["config"]["ablation"] == ablation
    assert found["brittleness"]["teacher"]


def test_models_that_fail_the_task_are_warned_of(small: Arguments) -> None:
    for ablation in ("mean", "none"):
        result = call("robustness", *small, "--ablation", ablation)
        assert result.exit_code == 0, result.stderr
        assert result.stderr.count("does not do this task") == 2
        assert "–" in result.stdout
        assert "fewer parameters" not in result.stdout
        assert "mean drop (%)" not in result.stdout
        assert ("mean drop (logits)" in result.stdout) is (ablation == "mean")


def test_out_keeps_what_python_reads(small: Arguments, tmp_path: Path) -> None:
    found = answer(call("robustness", *small, "--json", "--out", tmp_path))
    result = load_robustness(tmp_path)
    assert result.to_json() == found
    for name, start in (("behaviour", "side,model,kind"), ("agreement", "kind,condition"),
                        ("brittleness", "statistic,unit,teacher")):  # fmt: skip
        assert (tmp_path / f"{name}.csv").read_text().startswith(start)


@pytest.mark.parametrize("parts", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_run_ends_like_an_uninterrupted_one(
    small: Arguments, tmp_path: Path, parts: int
) -> None:
    """Killed in the teacher's perturbed inputs, and between them and the ablations."""
    options = ["robustness", *map(str, small), "--json", "--threads", "1"]
    whole = answer(call(*options, "--out", tmp_path / "whole"))
    stopped = stop_by("SIGKILL", parts, options, tmp_path / "killed")
    assert stopped.returncode < 0
    kept = parts_in(tmp_path / "killed")
    assert len(kept) == parts
    assert answer(call(*options, "--out", tmp_path / "killed")) == whole
    assert kept.items() <= parts_in(tmp_path / "killed").items()
    for name in ("robustness.json", "robustness.safetensors", "behaviour.csv"):
        texts = {(tmp_path / run / name).read_bytes() for run in ("whole", "killed")}
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--teacher", "no-such-model"), ("no-such-model", "tiny-teacher")),
        (("--task", "numeral"), ("numerals",)),
        (("-n", "3"), ("at least 8",)),
        (("--seed", "-1"), ("--seed",)),
        (("--variant", "unseen"), ("unseen",)),
        (("--noise", "0"), ("--noise", "greater than 0")),
        (("--noise", "nan"), ("--noise", "greater than 0")),
        (("--noise", "0.5", "--noise", "0.5"), ("once",)),
        (("--ablation", "magic"), ("magic", "mean, zero, resample, none")),
        (("--device", "tpu9"), ("tpu9", "cuda")),
        (("--dtype", "int8"), ("int8", "bfloat16")),
        (("--bos", "<start>"), ("<start>",)),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(call("robustness", *arguments), *words)


def test_help_has_examples() -> None:
    result = call("robustness", "--help")
    assert result.exit_code == 0
    for word in ("Examples", "--variant", "--noise", "out-of-distribution"):
        assert word in result.stdout
