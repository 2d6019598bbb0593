"""Fault 20: ids and orders that came from ``hash(str)``, another in every process."""

import os
import subprocess
import sys
from pathlib import Path

from tiny import save_tiny_model


def test_two_processes_print_the_same_bytes(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", tasks=("weekdays",))
    program = [sys.executable, "-m", "circuitkd.cli", "score", "--json", "--threads", "1"]
    models = ["--teacher", str(model), "--student", str(model), "--task", "weekdays", "-n", "8"]
    printed = [
        subprocess.run(
            [*program, *models],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0]
    assert printed[0] == printed[1]
