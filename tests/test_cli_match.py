"""``circuitkd match``: what it prints, saves and refuses."""

import json
from pathlib import Path

import pandas as pd
import pytest
from test_cli import assert_refused, call
from typer.testing import Result

from circuitkd.compare.comparison import compare, load_comparison
from circuitkd.compare.similarity import RECORDED_MEASURES

PAIR = ("--task", "weekdays", "-n", "12")


def answer(result: Result) -> dict:
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "method",
    ["transport", *(pytest.param(m, marks=pytest.mark.slow) for m in ("argmax", "one-to-one"))],
)
def test_json_is_what_the_library_matches(method: str) -> None:
    found = answer(call("match", *PAIR, "--method", method, "--measure", "svcca", "--json"))
    expected = compare(
        "tiny-teacher", "tiny-student", "weekdays", n=12, measure="svcca", null_draws=0
    ).matched(method)
    assert found["method"] == method
    assert found["config"]["measure"] == "svcca"
    assert [row["teacher"] for row in found["matches"]] == expected["teacher"].tolist()
    assert [row["student"] for row in found["matches"]] == expected["student"].tolist()
    for row, mass in zip(found["matches"], expected["mass"], strict=True):
        assert row["mass"] == pytest.approx(mass, abs=1e-6)


@pytest.mark.slow
def test_verified_pairs_are_marked(tmp_path: Path) -> None:
    itself = ("--student", "tiny-teacher", "--verify", "--top", "2", "--out", tmp_path / "run")
    result = call("match", *PAIR, *itself)
    assert result.exit_code == 0, result.stderr
    assert "survives a swap" in result.stdout
    assert result.stdout.count("verified") > 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    table = pd.read_csv(tmp_path / "run" / "matches.csv")
    assert table["verified"].notna().sum() == 2
    assert table["survived"].dropna().round(2).tolist() == [1.0, 1.0]
    again = load_comparison(tmp_path / "run")
    assert again.swaps is not None
    assert len(again.swaps.matches) == 2


def test_top_is_how_many_pairs_are_printed() -> None:
    result = call("match", *PAIR, "--top", "3")
    assert result.exit_code == 0, result.stderr
    assert sum(line.startswith("T ") for line in result.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "nearest"), ["--method", "one-to-one"]),
        (("--measure", "ov_circuit"), ["ov_circuit", "svcca"]),
        (("--ablation", "median"), ["--ablation", "resample"]),
        (("-n", "3"), ["-n 3"]),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(arguments: tuple[str, str], words: list[str]) -> None:
    assert_refused(call("match", *PAIR, *arguments), *words)


def test_help_names_every_measure_and_has_examples() -> None:
    text = " ".join(call("match", "--help").stdout.replace("│", " ").split())
    assert all(name in text for name in RECORDED_MEASURES)
    assert "circuitkd match --task numerals --verify" in text
