"""The benchmarks run, and stop where the two ways that they time differ."""

import subprocess
import sys
from pathlib import Path

import pytest

PATCHING = Path(__file__).parents[1] / "benchmarks" / "patching.py"


@pytest.mark.slow
def test_the_circuit_benchmark_runs_and_finds_equal_results() -> None:
    command = [sys.executable, str(PATCHING), "--quick", "--threads", "1", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 + 6 + 2  # headings; eap, eap-ig; four receivers and all; one size
