"""The command line: what it prints where, its exit codes, and every wrong input in one sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import save_tiny_model
from tokenizers_for_tests import word_level, words_of
from typer.testing import CliRunner, Result

from circuitkd._cli_run import ABLATIONS
from circuitkd._cli_score import PRESETS
from circuitkd.cli import app
from circuitkd.tasks import load_task, task_names, tasks_directory

KEYS = {
    "alignment", "paper_alignment", "teacher", "student", "matches", "merges", "drops",
    "config", "versions",
}  # fmt: skip
PERFORMANCE = {"name", "metric_mean", "metric_low", "metric_high", "accuracy", "competent"}

# NAMES stands for the list of words, of which tests leave some out of a vocabulary.
NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fred", "Gina", "Hugo")
FILLERS = ("then", "met", "and", "smiled", "at")
MEETINGS = f"""
name: meetings
title: Meetings
description: Two people meet, and the other one is named.
source: this test
metric: logit_difference
positions: [A, B]
words:
  names: [{", ".join(NAMES)}]
slots:
  A: {{from: names}}
  B: {{from: names}}
answer: " {{B}}"
distractor: " {{A}}"
corruption:
  redraw: [A, B]
templates:
  - "then {{A}} met {{B}} and smiled at"
variants:
  loud:
    description: in capitals
    case: upper
"""


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def score(*arguments: str | Path) -> Result:
    """On the bundled pair and with few prompts, where ``arguments`` say nothing else."""
    return call("score", "-n", "8", "--random-students", "0", *arguments)


def assert_refused(result: Result, *words: str) -> None:
    """One clear sentence on standard error, exit code 2, and nothing else anywhere."""
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """Arguments: two tiny models that know the words of the shipped tasks and of a task file."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "meetings.yaml").write_text(MEETINGS)
    teacher = save_model_with(folder / "teacher", NAMES, layers=3)
    student = save_model_with(folder / "student", NAMES)
    task = folder / "meetings.yaml"
    return ("--teacher", teacher, "--student", student, "--task", task)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model directory for a test to spoil."""
    return save_model_with(tmp_path / "model", NAMES)


@pytest.fixture
def meetings(tmp_path: Path) -> Path:
    path = tmp_path / "meetings.yaml"
    path.write_text(MEETINGS)
    return path


@pytest.fixture(scope="module")
def years(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """greater_than with one template, and beside it a tiny model that knows its words."""
    content = yaml.safe_load((tasks_directory() / "greater_than.yaml").read_text())
    del content["variants"]
    path = tmp_path_factory.mktemp("years") / "years.yaml"
    path.write_text(yaml.safe_dump({**content, "templates": content["templates"][:1]}))
    save_tiny_model(path.parent / "model")
    word_level(words_of(load_task(path))).save_pretrained(path.parent / "model")
    return path


@pytest.fixture(scope="module")
def bundled() -> Result:
    return call("score", "--json")


class TestScore:
    def test_json_is_one_object_and_nothing_else(self, bundled: Result) -> None:
        assert bundled.exit_code == 0, bundled.stderr
        found = json.loads(bundled.stdout)
        assert set(found) >= KEYS
        assert set(found["alignment"]) >= {"value", "low", "high", "null", "floor", "ceiling"}
        assert set(found["teacher"]) >= PERFORMANCE
        assert set(found["student"]) >= PERFORMANCE
        assert found["config"]["n"] == 100
        assert found["versions"]["torch"] == torch.__version__

    def test_the_bundled_pair_does_the_task_with_circuits_that_are_partly_alike(
        self, bundled: Result
    ) -> None:
        found = json.loads(bundled.stdout)
        for side in ("teacher", "student"):
            assert found[side]["accuracy"] == 1
            assert found[side]["competent"] is True
        alignment = found["alignment"]
        assert 0 < alignment["low"] <= alignment["value"] <= alignment["high"] < 1
        assert found["matches"]

    def test_nothing_is_warned_of_where_nothing_is_wrong(self, bundled: Result) -> None:
        assert bundled.stderr == ""

    def test_a_model_against_itself_is_one(self, small: tuple[str | Path, ...]) -> None:
        result = score(*small, "--student", small[1], "--json")
        alignment = json.loads(result.stdout)["alignment"]
        assert alignment["value"] == pytest.approx(1, abs=1e-6)

    def test_tables_go_to_standard_output_and_warnings_to_standard_error(
        self, small: tuple[str | Path, ...]
    ) -> None:
        result = score(*small)
        assert result.exit_code == 0, result.stderr
        for word in ("teacher", "student", "accuracy", "circuit alignment", "paper's formula",
                     "strongest matched pairs", "merged", "dropped"):  # fmt: skip
            assert word in result.stdout
        assert "Warning" not in result.stdout
        assert "Only 8 prompts" in result.stderr
        assert "does not do this task" in result.stderr

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize(
        "ablation", ["mean", *(pytest.param(a, marks=pytest.mark.slow) for a in ABLATIONS[1:])]
    )
    def test_every_combination_runs(
        self, small: tuple[str | Path, ...], ablation: str, preset: str
    ) -> None:
        result = score(*small, "--ablation", ablation, "--preset", preset, "--json")
        assert result.exit_code == 0, (result.stderr, result.exception)
        found = json.loads(result.stdout)
        assert (found["config"]["ablation"], found["config"]["preset"]) == (ablation, preset)
        assert found["paper_alignment"] is not None

    @pytest.mark.parametrize(
        "ablation", ["mean", *(pytest.param(a, marks=pytest.mark.slow) for a in ABLATIONS[1:])]
    )
    def test_every_ablation_runs_with_a_set_of_answers(self, ablation: str, years: Path) -> None:
        models = ("--teacher", years.parent / "model", "--student", years.parent / "model")
        result = score(*models, "--task", years, "--ablation", ablation, "--json")
        assert result.exit_code == 0, (result.stderr, result.exception)
        assert json.loads(result.stdout)["teacher"]["unit"] == "probability"

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--variant", "loud"),
            ("--bos", "none"),
            ("--bos", "<unk>"),
            ("--dtype", "bfloat16"),
            ("--batch-size", "3"),
            ("--threads", "1"),
            ("--seed", "7"),
            ("-n", "9"),
        ],
    )
    def test_every_other_option_runs(
        self, small: tuple[str | Path, ...], option: str, value: str
    ) -> None:
        result = score(*small, "--json", option, value)
        assert result.exit_code == 0, (result.stderr, result.exception)

    def test_out_keeps_the_result(self, small: tuple[str | Path, ...], tmp_path: Path) -> None:
        result = score(*small, "--out", tmp_path / "run", "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["config"]["task"] == "meetings"
        assert "Saved" in result.stderr
        names = {path.name for path in (tmp_path / "run").iterdir()}
        assert {"config.json", "comparison.json", "comparison.safetensors"} <= names


class TestWrongInput:
    @pytest.mark.parametrize("side", ["--teacher", "--student"])
    def test_an_unknown_model(self, side: str) -> None:
        assert_refused(score(side, "no-such-model"), "no-such-model", "tiny-teacher")

    def test_an_unknown_path(self) -> None:
        assert_refused(score("--student", "./nowhere"), "./nowhere", "not a directory")

    def test_an_unknown_task(self) -> None:
        assert_refused(score("--task", "numeral"), "numeral", "Did you mean 'numerals'")

    def test_an_unknown_ablation(self) -> None:
        assert_refused(score("--ablation", "knockout"), "knockout", "mean, zero, resample")

    @pytest.mark.parametrize(
        ("option", "value", "allowed"),
        [
            ("--preset", "papers", "default, paper"),
            ("--dtype", "int8", "float32, bfloat16, float16"),
            ("--variant", "unseen", "unseen_words"),
            ("--device", "tpu9", "cpu, cuda"),
            ("--seed", "-1", "0 or more"),
            ("--bos", "<start>", "<start>"),
        ],
    )
    def test_other_values_that_are_not_there(self, option: str, value: str, allowed: str) -> None:
        assert_refused(score(option, value), value, allowed)

    @pytest.mark.parametrize("n", ["7", "0", "-1"])
    def test_too_few_prompts(self, n: str) -> None:
        assert_refused(call("score", "-n", n), n, "at least 8")

    @pytest.mark.parametrize("arguments", [("-n", "many"), ("--batch-size", "0"), ("--tsk", "ioi")])
    def test_what_typer_refuses(self, arguments: tuple[str, str]) -> None:
        result = call("score", *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert arguments[0] in result.stderr

    def test_a_directory_without_weights(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        assert_refused(score("--student", copy), "no weights", "safetensors")

    def test_pickled_weights_only(self, copy: Path) -> None:
        (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
        assert_refused(score("--student", copy), "pickled", "can run any code")

    def test_nan_weights(self, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        weights["transformer.h.0.mlp.c_fc.bias"][3] = float("nan")
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        assert_refused(score("--student", copy), "NaN", "h.0.mlp.c_fc.bias")

    def test_a_vocabulary_that_lacks_the_tasks_words(self, copy: Path) -> None:
        models = ("--teacher", copy, "--student", copy)
        assert_refused(score(*models, "--task", "months"), "months", "January")

    def test_teacher_and_student_that_share_too_few_words(
        self, meetings: Path, tmp_path: Path
    ) -> None:
        teacher = save_model_with(tmp_path / "teacher", NAMES[:5])
        student = save_model_with(tmp_path / "student", NAMES[4:])
        result = score("--teacher", teacher, "--student", student, "--task", meetings)
        assert_refused(result, "too few usable words", "names")

    def test_an_out_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert_refused(score("--out", tmp_path / "file"), "is a file")
        assert_refused(score("--out", tmp_path / "file" / "run"), "cannot be written")

    def test_an_out_that_holds_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("precious")
        assert_refused(score("--out", tmp_path), "thesis.tex")
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_an_out_of_a_run_with_other_arguments(
        self, small: tuple[str | Path, ...], tmp_path: Path
    ) -> None:
        assert score(*small, "--out", tmp_path).exit_code == 0
        assert_refused(score(*small, "--out", tmp_path, "--seed", "1"), "seed was 0, now 1")

    def test_an_out_of_a_run_with_other_weights(
        self, copy: Path, meetings: Path, tmp_path: Path
    ) -> None:
        arguments = ("--teacher", copy, "--student", copy, "--task", meetings)
        out = ("--out", tmp_path / "run")
        assert score(*arguments, *out).exit_code == 0
        save_model_with(copy, NAMES, seed=5)
        assert_refused(score(*arguments, *out), "content.student was", "content.teacher was")

    def test_wrong_input_does_not_claim_the_directory(
        self, copy: Path, meetings: Path, tmp_path: Path
    ) -> None:
        arguments = ("--teacher", copy, "--student", copy, "--out", tmp_path / "run")
        assert_refused(score(*arguments, "--task", "months"))
        assert score(*arguments, "--task", meetings).exit_code == 0

    def test_a_template_that_lacks_its_answer_slot(self, meetings: Path) -> None:
        meetings.write_text(MEETINGS.replace("met {B} and", "met me and"))
        result = score("--task", meetings)
        assert_refused(result, "meetings.yaml", "line", "templates[0]", "B")

    def test_a_task_file_that_is_not_there(self) -> None:
        assert_refused(score("--task", "./no.yaml"), "no task file")
        assert_refused(call("tasks", "show", "./no.yaml"), "no task file")

    def test_it_is_told_before_models_are_loaded(self, copy: Path) -> None:
        """Of two faults, the one that costs nothing to find is told."""
        (copy / "model.safetensors").write_bytes(b"nothing")
        assert_refused(score("--student", copy, "--task", "no-such-task"), "no-such-task")


class TestTasks:
    def test_all_are_listed_with_their_variants(self) -> None:
        result = call("tasks")
        assert result.exit_code == 0
        for name in task_names():
            assert name in result.stdout
        assert "unseen_starts" in result.stdout

    @pytest.mark.parametrize("name", task_names())
    def test_samples_are_shown_as_text(self, name: str) -> None:
        result = call("tasks", "show", name, "-n", "2")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.count("clean") == 2
        assert result.stdout.count("corrupted") == 2
        for label in load_task(name).labels:
            assert f"[{label}]" in result.stdout

    def test_samples_are_shown_as_the_tokens_of_a_model(self) -> None:
        result = call("tasks", "show", "ioi", "--model", "tiny-teacher", "-n", "4")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.count("corrupted") == 4
        assert "[IO]" in result.stdout
        assert "·" in result.stdout

    def test_a_variant_is_named(self) -> None:
        result = call("tasks", "show", "ioi", "--variant", "typos")
        assert result.exit_code == 0, result.stderr
        assert "variant typos" in result.stdout

    def test_a_file_of_ones_own(self, meetings: Path) -> None:
        result = call("tasks", "show", meetings)
        assert result.exit_code == 0, result.stderr
        assert "meetings: Meetings" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (("nothing",), "nothing"),
            (("ioi", "--variant", "nothing"), "typos"),
            (("ioi", "--model", "./nowhere"), "not a directory"),
            (("ioi", "--model", "tiny-teacher", "--bos", "<start>"), "<start>"),
        ],
    )
    def test_wrong_input_is_refused(self, arguments: tuple[str, ...], word: str) -> None:
        assert_refused(call("tasks", "show", *arguments), word)


def test_models_are_listed_and_how_to_name_others() -> None:
    result = call("models")
    assert result.exit_code == 0
    for word in ("tiny-teacher", "tiny-student", "hub id", "directory", "load_model", "Llama"):
        assert word in result.stdout


@pytest.mark.parametrize("command", ["", "score", "models", "doctor", "tasks", "tasks show"])
def test_help_has_examples(command: str) -> None:
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    examples = result.stdout.split("Examples")[1]
    assert f"circuitkd {command}".strip() in examples


def test_the_version_is_printed() -> None:
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout.split()[0] == "circuitkd"


IMPORTS = """
import sys
from circuitkd.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "pandas", "numpy") if name in sys.modules],
          file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["--help", "score --help", "tasks show --help", "--version"])
def test_help_answers_without_heavy_imports(command: str) -> None:
    ran = run([sys.executable, "-c", IMPORTS, *command.split()])
    assert ran.returncode == 0
    assert ran.stderr.strip() == "[]"


def test_a_process_keeps_its_streams_and_codes_apart() -> None:
    program = [sys.executable, "-m", "circuitkd.cli"]
    wrong = run([*program, "score", "--teacher", "./nowhere"])
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("Error: './nowhere'")
    assert "Traceback" not in wrong.stderr
    right = run([*program, "tasks"])
    assert (right.returncode, right.stderr) == (0, "")
    assert "ioi" in right.stdout


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def save_model_with(
    directory: Path, names: tuple[str, ...], *, layers: int = 2, seed: int = 0
) -> Path:
    """A tiny model that knows the words of MEETINGS, and of its names only ``names``."""
    save_tiny_model(directory, layers=layers, seed=seed)
    words = [*FILLERS, *names]
    word_level([*words, *map(str.upper, words)]).save_pretrained(directory)
    return directory
