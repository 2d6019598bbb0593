"""Fault 12: only a batch size that fits a large device worked; here any size gives the number."""

from pathlib import Path

import pytest
from tiny import save_tiny_model

from circuitkd import compare, load_task


def test_a_comparison_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    task = load_task("weekdays")
    task = task.model_copy(update={"templates": task.templates[:1]})
    teacher = save_tiny_model(tmp_path / "teacher", tasks=("weekdays",))
    student = save_tiny_model(tmp_path / "student", layers=1, seed=1, tasks=("weekdays",))
    results = [
        compare(teacher, student, task, n=9, draws=20, null_draws=0, batch_size=size)
        for size in (None, 4, 1)
    ]
    for other in results[1:]:
        assert other.alignment.value == pytest.approx(results[0].alignment.value, abs=1e-5)
        assert other.alignment.low == pytest.approx(results[0].alignment.low, abs=1e-5)
