"""``circuitkd doctor``, with the network off: conftest sets HF_HUB_OFFLINE."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from circuitkd import _doctor, _smollm2
from circuitkd._doctor import diagnose, versions
from circuitkd._pairs import HUB_PAIRS
from circuitkd.cli import app


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CIRCUITKD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


def found(about: str) -> tuple[str, str]:
    checks = [check for topic in diagnose().topics.values() for check in topic]
    [check] = [check for check in checks if check.about == about]
    return check.state, check.found


def test_a_sound_installation_exits_with_0_and_says_what_runs() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in (
        "Python",
        "torch",
        "transformer-lens",
        "cpu",
        "GB free",
        "model hub",
        "not asked",
        "tiny-teacher",
        "smollm2-135m",
        "distilgpt2",
        "The bundled pair runs here.",
    ):
        assert word in result.stdout  # fmt: skip


def test_what_is_broken_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_PACKAGES", ("torch", "no-such-package"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "missing: run pip install circuitkd again" in result.stdout
    assert "The bundled pair runs here." not in result.stdout


def test_a_bundled_model_that_cannot_be_read_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("circuitkd.models.BUNDLED_DIRECTORY", tmp_path)
    (tmp_path / "tiny-teacher").mkdir()
    (tmp_path / "tiny-teacher" / "config.json").write_text("{")
    state, words = found("tiny-teacher")
    assert state == "broken"
    assert "config.json" in words


def test_no_bundled_models_at_all_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("circuitkd.models.BUNDLED_DIRECTORY", tmp_path)
    assert found("bundled")[0] == "broken"


def test_smollm2_is_missing_installed_or_unpacked(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_smollm2, "is_installed", lambda: False)
    assert found("smollm2-135m")[0] == "note"
    monkeypatch.setattr(_smollm2, "is_installed", lambda: True)
    assert "when first loaded" in found("smollm2-135m")[1]
    monkeypatch.setattr(_smollm2, "is_cached", lambda: True)
    assert str(cache) in found("smollm2-135m")[1]


def test_what_fits_follows_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sorted(pair.bytes_needed for pair in HUB_PAIRS)
    monkeypatch.setattr(_doctor, "memory_by_device", lambda: {"cpu": needed[2]})
    fits = [where for _, _, where in diagnose().pairs]
    assert fits.count("cpu") == 3
    assert fits.count("nowhere here") == len(HUB_PAIRS) - 3


def test_too_little_memory_for_anything_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "memory_by_device", lambda: {"cpu": 10**8})
    assert found("memory")[0] == "broken"


def test_versions_are_those_installed() -> None:
    assert [check.state for check in versions(["torch", "no-such-package"])] == [
        "ok", "ok", "ok", "broken",
    ]  # fmt: skip
