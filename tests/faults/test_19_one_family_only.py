"""Fault 19: what worked for GPT-2 failed for other families. The whole pipeline, every pairing."""

from pathlib import Path

import pytest
from random_models import FAMILIES, random_gpt2, random_llama
from tokenizers_for_tests import byte_level, llama_like, words_of

from circuitkd import compare, load_task
from circuitkd.compare.comparison import Comparison

TASK = load_task("weekdays")
TASK = TASK.model_copy(update={"templates": TASK.templates[:1]})


def save(family: str, directory: Path) -> Path:
    make_tokenizer = {"gpt2": byte_level, "llama": llama_like}[family]
    tokenizer = make_tokenizer(words_of(TASK))
    make = {"gpt2": random_gpt2, "llama": random_llama}[family]
    network = make(layers=2, vocabulary=len(tokenizer), seed=3)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("student", FAMILIES)
@pytest.mark.parametrize("teacher", FAMILIES)
def test_any_family_compares_with_any(teacher: str, student: str, tmp_path: Path) -> None:
    paths = save(teacher, tmp_path / "teacher"), save(student, tmp_path / "student")
    result: Comparison = compare(*paths, TASK, n=8, draws=0, null_draws=10, random_students=1)
    if teacher == student:
        assert result.alignment.value == pytest.approx(1, abs=1e-6)
    else:
        assert 0 <= result.alignment.value < 0.99
    assert (result.influences["student"].effects.abs().sum(0) > 0).all()
