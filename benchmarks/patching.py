"""Speed and memory of edge attribution and path patching, as ratios measured in one run.

    python benchmarks/patching.py [--threads 2] [--rounds 2] [--quick]

On random models of GPT-2 small's width, prompts of 23 tokens, ablation ``corrupted``:

1. EAP and EAP-IG with 5 steps: ``edge_attribution`` against hooks written the straightforward way,
   as published: a fork of the residual stream for every head's query, key and value, every head's
   output apart, all differences kept [batch, pos, sender, d_model], and in the backward pass one
   product with the gradient [batch, pos, receiver, d_model] for each group of receivers. Weights
   need no gradients. Prompts go in batches of 16 or all at once, whichever is faster here.
2. Path patching of all edges from heads into 8 queries, keys and values: ``path_patching``
   against one hooked run an edge. That run costs no more than a plain pass: corrupted and clean
   outputs are cached, and a hook puts the head's new query, key or value in. It costs the same for
   every edge: it is measured on a sample, between the pieces of ``path_patching``, and scaled to
   all of them.
3. Peak memory of EAP above the loaded model, each in a process of its own.

The rivals run a TransformerBridge as TransformerLens makes it; both have the same weights.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from influence import (
    LENGTH,
    PROMPTS,
    memory_bytes,
    plain_bridge,
    random_gpt2,
    random_prompts,
    reset_peak,
)
from plain_hooks import OneEdge, batch_of, naive_scores
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config

from circuitkd.circuits.attribution import edge_attribution
from circuitkd.circuits.edges import Edge, Receiver, layout_of
from circuitkd.circuits.patching import path_patching
from circuitkd.prompts import Prompts

STEPS, EVERY = 5, 5  # of EAP-IG; pieces of path_patching between two hooked runs
TOLERANCE = 1e-3  # of the largest score or effect, float32
# Where Wang et al. (2022) patch paths into in GPT-2 small: the values of the S-inhibition heads and
# the queries of the name movers and of a negative one. Chosen before anything was measured.
RECEIVERS = (
    *("a7.h3<v>", "a7.h9<v>", "a8.h6<v>", "a8.h10<v>"),
    *("a9.h6<q>", "a9.h9<q>", "a10.h0<q>", "a10.h7<q>"),
)
QUICK_RECEIVERS = ("a1.h0<q>", "a1.h1<k>", "a2.h2<v>", "a2.h3<q>")


# ---------------------------------------------------------------------- measurements


def seconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


@dataclass(frozen=True)
class Pair:
    """The same random model twice, and prompts."""

    ours: TransformerBridge
    plain: TransformerBridge
    prompts: Prompts

    @staticmethod
    def of(config: GPT2Config, n_prompts: int) -> "Pair":
        plain = plain_bridge(config).requires_grad_(False)
        return Pair(random_gpt2(config), plain, random_prompts(config.vocab_size, n_prompts))


def require_equal(difference: float) -> None:
    """Stops where the two ways differ by more than rounding: their times would say nothing."""
    if not difference < TOLERANCE:
        raise SystemExit(f"The results differ by {difference:.0e} of the largest.")


def attribution_table(pair: Pair, rounds: int, batches: tuple[int, ...]) -> None:
    def hooks(points: list[float], rows: int) -> tuple[float, Tensor]:
        return seconds(partial(naive_scores, pair.plain, batch_of(pair.prompts), points, rows))

    rows = min(batches, key=lambda rows: hooks([1.0], rows)[0])
    print(f"\nStraightforward hooks take {rows} prompts at once: the fastest of {batches}.\n")
    print("| | straightforward hooks | `edge_attribution` | ratio | largest difference |")
    print("|---|---|---|---|---|")
    midpoints = [(step + 0.5) / STEPS for step in range(STEPS)]
    for method, points in (("eap", [1.0]), ("eap-ig", midpoints)):
        attribution_row(pair, method, rounds, partial(hooks, points, rows))


def attribution_row(
    pair: Pair, method: str, rounds: int, hooks: Callable[[], tuple[float, Tensor]]
) -> None:
    def own() -> Tensor:
        scores = edge_attribution(pair.ours, pair.prompts, method=method, steps=STEPS)
        return scores.scores.sum(0)

    times: list[tuple[float, float]] = []
    difference = 0.0
    for _ in range(rounds):
        (ours, result), (theirs, expected) = seconds(own), hooks()
        times.append((theirs, ours))
        worst = (result - expected).abs().max() / expected.abs().max()
        difference = max(difference, float(worst))
    require_equal(difference)
    theirs, ours = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(naive / own for naive, own in times)
    print(
        f"| {method}{f', {STEPS} steps' if method == 'eap-ig' else ''} | {theirs:.1f} s | "
        f"{ours:.1f} s | **{ratio:.2f}** | {difference:.0e} of the largest score |",
        flush=True,
    )


@dataclass
class Sampler:
    """Progress callback of path_patching: between its pieces, times one hooked run of an edge."""

    rival: OneEdge
    edges: list[Edge]  # by receiver, in order of computation
    receivers: list[Receiver]
    resumed: float = field(default_factory=time.perf_counter)
    ours: dict[Receiver, float] = field(default_factory=dict)
    theirs: list[float] = field(default_factory=list)
    effects: dict[Edge, Tensor] = field(default_factory=dict)
    pieces: int = 0

    def __call__(self, _stage: str, _done: int, _total: int) -> None:
        spent = time.perf_counter() - self.resumed
        receiver = self.receivers[self.pieces % len(self.receivers)]
        self.ours[receiver] = self.ours.get(receiver, 0.0) + spent
        if self.pieces % EVERY == 0:
            own = [edge for edge in self.edges if edge.receiver == receiver]
            edge = own[17 * self.pieces % len(own)]
            time_taken, self.effects[edge] = seconds(partial(self.rival.effect, edge))
            self.theirs.append(time_taken)
        self.pieces += 1
        self.resumed = time.perf_counter()


def patching_table(pair: Pair, names: tuple[str, ...], batch_size: int | None) -> None:
    layout = layout_of(pair.ours)
    receivers = [receiver for receiver in layout.receivers if receiver.name in names]
    senders = [node for node in layout.senders if node.kind == "head"]
    edges = [e for e in layout.edges if e.sender in senders and e.receiver in receivers]
    sampler = Sampler(OneEdge(pair.plain, batch_of(pair.prompts)), edges, receivers)
    result = path_patching(
        pair.ours, pair.prompts, senders, receivers, batch_size=batch_size, progress=sampler
    )
    run = statistics.mean(sampler.theirs)
    print("\n| receiver | edges | one hooked run an edge | `path_patching` | ratio |")
    print("|---|---|---|---|---|")
    for receiver in receivers:
        count = sum(edge.receiver == receiver for edge in edges)
        ours, theirs = sampler.ours[receiver], count * run
        print(f"| {receiver} | {count} | {theirs:.0f} s | {ours:.1f} s | {theirs / ours:.1f} |")
    ours, theirs = sum(sampler.ours.values()), len(edges) * run
    print(f"| **all** | {len(edges)} | {theirs:.0f} s | {ours:.1f} s | **{theirs / ours:.1f}** |")
    largest = float(result.effects.abs().max())
    worst = max(
        float((result.effects[:, result.edges.index(edge)] - effect).abs().max())
        for edge, effect in sampler.effects.items()
    )
    require_equal(worst / largest)
    print(
        f"\nWanted: 10 times. One hooked run: {run:.2f} s, {min(sampler.theirs):.2f} to "
        f"{max(sampler.theirs):.2f} s on {len(sampler.theirs)} edges; extrapolated to all. On "
        f"these edges the two differ by at most {worst:.0e} logits; the largest effect is "
        f"{largest:.0e}. The first receiver's time holds the clean and the corrupted run.",
        flush=True,
    )


# ---------------------------------------------------------------------- memory


def memory_of_one_run(what: str, n_prompts: int, layers: int, width: int) -> None:
    """Print the peak of resident memory, in bytes, above what it is when the model is loaded."""
    config = sized(layers, width)
    ours = what == "ours"
    model = random_gpt2(config) if ours else plain_bridge(config).requires_grad_(False)

    def run(count: int) -> None:
        prompts = random_prompts(config.vocab_size, count)
        if ours:
            edge_attribution(model, prompts, method="eap")
        else:
            naive_scores(model, batch_of(prompts), [1.0], count)

    run(1)  # touches every weight, and loads what libraries load late
    reset_peak()
    before = memory_bytes("VmRSS")
    run(n_prompts)
    print(memory_bytes("VmHWM") - before)


def peak_memory(what: str, n_prompts: int, layers: int, width: int, threads: int) -> float:
    """Peak of one EAP in a process of its own, GiB above the loaded model."""
    sizes = [str(number) for number in (n_prompts, layers, width)]
    command = [sys.executable, __file__, "--threads", str(threads), "--memory", what, *sizes]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) / 2**30


def memory_table(sizes: list[tuple[int, int]], width: int, threads: int) -> None:
    print("\nPeak memory of EAP above the loaded model; the hooks take all prompts at once.\n")
    print("| prompts | layers | straightforward hooks | `edge_attribution` |")
    print("|---|---|---|---|")
    for n_prompts, layers in sizes:
        ours = peak_memory("ours", n_prompts, layers, width, threads)
        theirs = "-"
        if n_prompts * layers <= 64 * 12:
            theirs = f"{peak_memory('naive', n_prompts, layers, width, threads):.2f} GiB"
        print(f"| {n_prompts} | {layers} | {theirs} | {ours:.2f} GiB |", flush=True)


def sized(layers: int, width: int) -> GPT2Config:
    """GPT-2 with heads 64 wide, or a small thing of the same shape."""
    if width == 768:
        return GPT2Config(n_layer=layers)
    return GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny model: does the script work?")
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory is not None:
        what, *numbers = arguments.memory
        memory_of_one_run(what, *(int(number) for number in numbers))
        return
    config, n_prompts = (sized(3, 32), 8) if arguments.quick else (sized(12, 768), PROMPTS)
    start = time.perf_counter()
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {config.n_layer} layers of width "
        f"{config.n_embd}, {n_prompts} x {LENGTH} tokens, {arguments.rounds} rounds"
    )
    pair = Pair.of(config, n_prompts)
    if arguments.quick:
        attribution_table(pair, arguments.rounds, (4, 8))
        patching_table(pair, QUICK_RECEIVERS, 4)
        memory_table([(4, 2)], 32, arguments.threads)
    else:
        attribution_table(pair, arguments.rounds, (16, 64))
        patching_table(pair, RECEIVERS, None)
        sizes = [(16, 12), (64, 12), (256, 12), (64, 6), (64, 24)]
        memory_table(sizes, 768, arguments.threads)
    print(f"\nwhole run: {(time.perf_counter() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
