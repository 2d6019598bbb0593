"""Measure one model on every shipped task, and print the table of its results as Markdown.

    python scripts/model_table.py smollm2-135m --threads 2
    python scripts/model_table.py smollm2-135m --threads 2 --circuits ioi numerals --circuit-n 16
    python scripts/model_table.py smollm2-135m --threads 2 --dtypes numerals

The first prints how well the model does each task, with each policy on the beginning of the text.
``--circuits`` adds, for the tasks that follow, the circuit that ``circuitkd circuit`` finds at the
published threshold, in a process of its own whose time and peak memory are taken. ``--dtypes``
adds how much the influence shares on a task change with the number format.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformer_lens.model_bridge import TransformerBridge

import circuitkd as ckd
from circuitkd.circuits.ablated import NodeAblator
from circuitkd.errors import VocabularyError
from circuitkd.metrics import UNITS, accuracy, bootstrap_interval
from circuitkd.tasks import task_names

POLICIES = ("auto", "none", "<|endoftext|>")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=100, help="prompts a task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bos", nargs="+", default=POLICIES)
    parser.add_argument("--circuits", nargs="*", default=(), metavar="TASK")
    parser.add_argument("--circuit-n", type=int, default=256, help="prompts to search on")
    parser.add_argument("--dtypes", nargs="*", default=(), metavar="TASK")
    parser.add_argument("--dtype-n", type=int, default=32, help="prompts to compare formats on")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for line in performance(options.model, options.bos, options.n):
        print(line, flush=True)
    if options.circuits:
        print("\n" + "\n".join(heading("task", "nodes", "faithfulness", "time", "memory")))
    for task in options.circuits:
        print(circuit(options.model, task, options.circuit_n, options.threads), flush=True)
    for task in options.dtypes:
        print()
        for line in formats(options.model, task, options.dtype_n):
            print(line, flush=True)


def heading(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"


def performance(name: str, policies: Sequence[str], n: int) -> Iterator[str]:
    """One row a task: mean metric with its 95 % interval, and accuracy, for each BOS policy."""
    model = ckd.load_model(name)
    yield from heading("task", *(f"`--bos '{policy}'`" for policy in policies))
    for task in task_names():
        cells = [measured_cell(model, task, policy, n) for policy in policies]
        yield f"| `{task}` | {' | '.join(cells)} |"


def measured_cell(model: TransformerBridge, task: str, policy: str, n: int) -> str:
    try:
        prompts = ckd.load_task(task).sample(model, n, 0, bos=policy)
    except VocabularyError:
        return "does not fit its tokenizer"
    runs = NodeAblator(model, prompts, ablation="zero")
    metric = runs.metric(runs.nodes)
    low, high = bootstrap_interval(metric.double().numpy())
    return (
        f"{float(metric.mean()):.2f} [{low:.2f}, {high:.2f}] {UNITS[prompts.metric]}, "
        f"{100 * accuracy(metric):.0f} %"
    )


def circuit(name: str, task: str, n: int, threads: int) -> str:
    """A row: circuit size, faithfulness on other prompts, wall time and peak memory."""
    command = ["circuitkd", "circuit", name, "--task", task, "-n", str(n)]
    command += ["--threads", str(threads), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        start = time.monotonic()
        with out.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        data = json.loads(out.read_text())
    seconds = time.monotonic() - start
    sizes = data["circuit"]["sizes"]
    every = sizes["n_layers"] * (sizes["n_heads"] + 1)
    [faithful] = [run for run in data["runs"] if "faithfulness" in run["run"]]
    low, high = faithful["percent_low"], faithful["percent_high"]
    return (
        f"| `{task}` | {len(data['circuit']['nodes'])} of {every} "
        f"| {faithful['percent']:.0f} [{low:.0f}, {high:.0f}] % "
        f"| {seconds / 60:.1f} min | {1024 * usage.ru_maxrss / 1e9:.1f} GB |"
    )


def formats(name: str, task: str, n: int) -> Iterator[str]:
    """Largest change of any node's influence share against float32, and of the clean metric."""
    yield from heading("format", "clean metric", "largest change of a share", "of", "time")
    exact = None
    for dtype in ("float32", "bfloat16", "float16"):
        model = ckd.load_model(name, dtype=dtype)
        prompts = ckd.load_task(task).sample(model, n, 0)
        start = time.monotonic()
        measured = ckd.node_influence(model, prompts)
        seconds = time.monotonic() - start
        exact = measured if exact is None else exact
        change = np.abs(measured.share() - exact.share())
        worst = int(change.argmax())
        yield (
            f"| {dtype} | {float(measured.clean.mean()):.3f} | {change[worst]:.5f} "
            f"| {exact.nodes[worst].name}, {exact.share()[worst]:.4f} | {seconds:.0f} s |"
        )


if __name__ == "__main__":
    main()
