"""``circuitkd influence`` and ``circuitkd circuit``: what they print, save and refuse."""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from test_cli import assert_refused, call, save_model_with
from test_cli_interrupts import parts_in, stop_by
from typer.testing import Result

import circuitkd as ckd
from circuitkd._cli_run import ABLATIONS
from circuitkd.circuits.discovery import METHODS, SCORED
from circuitkd.tasks import tasks_directory

Arguments = tuple[str | Path, ...]


@pytest.fixture(scope="module")
def student() -> Arguments:
    """A model that does its task, and few prompts."""
    return ("tiny-student", "--task", "numerals", "-n", "16")


def answer(result: Result) -> dict:
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


class TestInfluence:
    def test_json_is_what_the_library_measures(self, student: Arguments) -> None:
        found = answer(call("influence", *student, "--json"))
        model = ckd.load_model("tiny-student")
        prompts = ckd.load_task("numerals").sample(model, n=16, seed=0)
        expected = ckd.node_influence(model, prompts)
        assert [row["node"] for row in found["nodes"]] == [node.name for node in expected.nodes]
        effects = [row["effect"] for row in found["nodes"]]
        assert effects == pytest.approx(expected.frame["effect"].tolist(), abs=1e-5)
        assert found["metric_mean"] == pytest.approx(float(expected.clean.mean()), abs=1e-4)
        assert found["competent"] is True
        assert found["config"]["n"] == 16
        assert "torch" in found["versions"]

    def test_the_table_has_units_and_intervals(self, student: Arguments) -> None:
        result = call("influence", *student, "--top", "3")
        assert result.exit_code == 0, result.stderr
        for word in ("logit difference", "effect (logits)", "MLP 1", "share", "95 %",
                     "15 weaker nodes"):  # fmt: skip
            assert word in result.stdout
        assert result.stderr == ""

    @pytest.mark.parametrize("ablation", ABLATIONS)
    def test_every_ablation_runs(self, student: Arguments, ablation: str) -> None:
        found = answer(call("influence", *student, "--ablation", ablation, "--json"))
        assert found["config"]["ablation"] == ablation

    def test_out_keeps_what_python_reads(self, student: Arguments, tmp_path: Path) -> None:
        found = answer(call("influence", *student, "--json", "--out", tmp_path))
        saved = ckd.Influence.load(tmp_path / "influence.safetensors")
        assert saved.frame["effect"].tolist() == [row["effect"] for row in found["nodes"]]
        assert (tmp_path / "influence.csv").read_text().startswith("node,kind,layer,head,effect")

    def test_a_model_that_fails_the_task_is_warned_of(self, tmp_path: Path) -> None:
        model, task = failing(tmp_path)
        result = call("influence", model, "--task", task, "-n", "8")
        assert result.exit_code == 0, result.stderr
        assert "does not do this task" in result.stderr
        assert "–" in result.stdout


class TestCircuit:
    @pytest.mark.parametrize(
        ("ablation", "method"),
        [
            pytest.param(
                ablation,
                method,
                marks=[pytest.mark.slow] if ablation and method in ("acdc", "auto") else [],
            )
            for ablation in (None, *ABLATIONS)
            for method in METHODS
        ],
    )
    def test_every_combination_runs(
        self, student: Arguments, ablation: str | None, method: str
    ) -> None:
        chosen = () if ablation is None else ("--ablation", ablation)
        # A threshold at which ACDC, which tests every edge, need not test many.
        sparse = ("--threshold", "0.05") if method == "acdc" else ()
        options = (*student, "-n", "8", "--method", method, *chosen, *sparse)
        found = answer(call("circuit", *options, "--json"))
        circuit = found["circuit"]
        assert circuit["method"] == method
        usual = "mean" if method == "prune" else "resample"
        assert circuit["ablation"] in (ablation or usual, "corrupted")
        assert (circuit["edges"] is None) is (method == "prune")
        assert [row["run"] for row in found["runs"]][1] == "circuit (faithfulness)"

    def test_it_is_judged_on_other_prompts(self, student: Arguments, tmp_path: Path) -> None:
        found = answer(call("circuit", *student, "--json", "--out", tmp_path))
        model = ckd.load_model("tiny-student")
        both = ckd.load_task("numerals").sample(model, n=32, seed=0)
        searched, judged = both.take(range(16)), both.take(range(16, 32))
        circuit = ckd.prune_nodes(model, searched)
        assert ckd.Circuit.load(tmp_path / "circuit.json") == circuit
        report = ckd.evaluate_circuit(model, judged, circuit, minimality=False, tests=False)
        assert found["runs"][1]["percent"] == pytest.approx(report.faithfulness, abs=1e-3)
        assert found["prompts_in_both_samples"] == 0

    def test_edges_are_the_strongest(self, student: Arguments, tmp_path: Path) -> None:
        options = ("--method", "eap", "--top", "25", "--out", tmp_path)
        circuit = answer(call("circuit", *student, "--json", *options))["circuit"]
        graph = ckd.read_graph(tmp_path / "graph.json")
        assert {edge.name for edge in graph.circuit.edge_set} == set(circuit["edges"])
        assert len(graph.edge_scores) == 310
        cut = sorted((abs(score or 0) for score in graph.edge_scores.values()), reverse=True)[24]
        assert 0 < len(circuit["edges"]) <= 25
        assert all(abs(score) >= cut - 1e-6 for score in circuit["edges"].values())

    @pytest.mark.slow
    def test_out_keeps_everything(self, student: Arguments, tmp_path: Path) -> None:
        call("circuit", *student, "--method", "auto", "--top", "30", "--out", tmp_path, "--details")
        names = {path.name for path in tmp_path.iterdir()}
        assert {"circuit.json", "report.json", "graph.json", "scores.safetensors"} <= names
        report = ckd.CircuitReport.load(tmp_path / "report.json")
        assert report.circuit == ckd.Circuit.load(tmp_path / "circuit.json")
        assert report.tests is not None
        scores = ckd.EdgeScores.load(tmp_path / "scores.safetensors")
        assert int(scores.exact.sum()) == 50

    @pytest.mark.parametrize("method", SCORED)
    def test_the_table_says_how_edges_were_scored(self, student: Arguments, method: str) -> None:
        result = call("circuit", *student, "-n", "8", "--method", method, "--top", "40")
        assert result.exit_code == 0, result.stderr
        says = {"path-patching": "exact effects", "auto": "rank correlation"}
        for word in ("faithfulness", "completeness", "strongest edges", "of 310 edges",
                     "other prompts", says.get(method, "estimates")):  # fmt: skip
            assert word in " ".join(result.stdout.split())

    def test_details_leave_out_each_part_and_test(self, student: Arguments) -> None:
        result = call("circuit", *student, "--details")
        assert result.exit_code == 0, result.stderr
        for word in ("each node left out", "tests of the circuit's claims", "strongest nodes"):
            assert word in result.stdout

    def test_a_model_that_fails_the_task_has_no_circuit(self, tmp_path: Path) -> None:
        model, task = failing(tmp_path)
        result = call("circuit", model, "--task", task, "-n", "8")
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "does not do this task" in result.stderr
        assert "Traceback" not in result.stderr

    def test_prompts_that_repeat_are_told(self, tmp_path: Path) -> None:
        content = yaml.safe_load((tasks_directory() / "ioi.yaml").read_text())
        del content["variants"]
        content["templates"] = content["templates"][:1]
        names = {*content["words"]} - {"names"}
        content["words"] |= {name: content["words"][name][:2] for name in names}
        content["words"]["names"] = content["words"]["names"][:5]  # 20 · 2 · 2 prompts
        (tmp_path / "few.yaml").write_text(yaml.safe_dump(content))
        options = ("tiny-student", "--task", tmp_path / "few.yaml", "--json", "-n")
        few, many = call("circuit", *options, "40"), call("circuit", *options, "48")
        assert answer(few)["prompts_in_both_samples"] == 0
        assert few.stderr == ""
        assert answer(many)["prompts_in_both_samples"] == 16
        assert "too few different prompts: 16 of the 48" in many.stderr

    @pytest.mark.parametrize(
        "method", [*(pytest.param(m, marks=pytest.mark.slow) for m in ("acdc", "eap-ig")), "prune"]
    )
    def test_a_killed_run_ends_like_an_uninterrupted_one(
        self, student: Arguments, tmp_path: Path, method: str
    ) -> None:
        # With other threads, sums may differ in their last digits.
        options = ["circuit", *map(str, student), "--method", method, "--json", "--threads", "1"]
        options += ["--threshold", "0.05"] if method == "acdc" else []
        whole = answer(call(*options, "--out", tmp_path / "whole"))
        stopped = stop_by("SIGKILL", 1, options, tmp_path / "killed")
        assert stopped.returncode < 0
        kept = parts_in(tmp_path / "killed")
        assert answer(call(*options, "--out", tmp_path / "killed")) == whole
        if method == "eap-ig":
            assert kept.items() <= parts_in(tmp_path / "killed").items()
        for name in ("circuit.json", "report.json", "graph.json"):
            texts = {(tmp_path / run / name).read_bytes() for run in ("whole", "killed")}
            assert len(texts) == 1
        if method == "eap-ig":
            one, other = (
                load_file(tmp_path / run / "scores.safetensors") for run in ("whole", "killed")
            )
            assert (one["scores"] == other["scores"]).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("circuit", "no-such-model"), ("no-such-model", "tiny-teacher")),
        (("influence", "no-such-model"), ("no-such-model", "tiny-teacher")),
        (("circuit", "tiny-student", "--method", "magic"), ("magic", "path-patching")),
        (("circuit", "tiny-student", "--ablation", "none"), ("none", "mean, zero, resample")),
        (("influence", "tiny-student", "--ablation", "none"), ("none", "mean, zero, resample")),
        (("circuit", "tiny-student", "--top", "5"), ("prune", "number of edges")),
        (("circuit", "tiny-student", "-n", "3"), ("at least 8",)),
        (("influence", "tiny-student", "--task", "numeral"), ("numerals",)),
        (("influence", "tiny-student", "--device", "tpu9"), ("tpu9", "cuda")),
        (("circuit", "tiny-student", "--dtype", "int8"), ("int8", "bfloat16")),
        (("circuit", "tiny-student", "--variant", "unseen"), ("unseen",)),
        (("circuit", "tiny-student", "--bos", "<start>"), ("<start>",)),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(call(*arguments), *words)


@pytest.mark.parametrize("threshold", ["-0.1", "1.5", "much"])
def test_a_threshold_is_a_share(threshold: str) -> None:
    result = call("circuit", "tiny-student", "--threshold", threshold)
    assert result.exit_code == 2
    assert "--threshold" in result.stderr


def failing(folder: Path) -> tuple[Path, Path]:
    """A random model, and a task whose words it knows."""
    from test_cli import MEETINGS, NAMES

    (folder / "meetings.yaml").write_text(MEETINGS)
    return save_model_with(folder / "model", NAMES), folder / "meetings.yaml"
