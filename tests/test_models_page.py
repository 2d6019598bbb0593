"""docs/models.md says what the code's tables say."""

from pathlib import Path

import models_page
import pytest

from circuitkd._pairs import HUB_PAIRS
from circuitkd.models import FAMILIES


def test_the_page_is_not_stale() -> None:
    assert models_page.main(["--check"]) == 0, "run python scripts/models_page.py"


def test_a_stale_or_missing_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_page, "PAGE", tmp_path / "models.md")
    assert models_page.main(["--check"]) == 1
    assert models_page.main([]) == 0
    assert models_page.main(["--check"]) == 0
    monkeypatch.setattr(models_page, "FAMILIES", FAMILIES[:-1])
    assert models_page.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err


def test_every_family_and_pair_is_on_it() -> None:
    page = models_page.page()
    for family in FAMILIES:
        assert family.name in page
        assert all(name in page for name in family.architectures)
    assert all(pair.command in page for pair in HUB_PAIRS)
    assert "{" not in page.split("## ")[1]
