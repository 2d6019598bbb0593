"""Speed and memory of edge attribution and path patching, as ratios measured in one run.

    python benchmarks/circuits.py [--threads 2] [--rounds 2] [--quick]

On random models of GPT-2 small's width, prompts of 23 tokens, ablation ``corrupted``:

1. EAP and EAP-IG with 5 steps: ``edge_attribution`` against hooks written the straightforward way,
   as published: a fork of the residual stream for every head's query, key and value, every head's
   output apart, all differences kept [batch, pos, sender, d_model], and in the backward pass one
   product with the gradient [batch, pos, receiver, d_model] for each group of receivers. It takes
   all prompts at once, or in batches of 16, whichever is faster here. Weights need no gradients.
2. Path patching of all edges from heads into 8 queries, keys and values: ``path_patching``
   against one hooked run an edge (corrupted and clean outputs cached, the head's own fork changed
   by a hook). The hooked run costs the same for every edge: it is measured on a sample, between
   the pieces of ``path_patching``, and scaled to all of them.
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
from einops import einsum
from influence import memory_bytes, plain_bridge, random_gpt2, random_prompts, reset_peak
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config

from circuitkd.circuits.attribution import edge_attribution
from circuitkd.circuits.edges import Edge, Receiver, layout_of
from circuitkd.circuits.patching import path_patching
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts

LENGTH, STEPS = 23, 5
# IOI's S-inhibition heads (values), name movers and negative name movers (queries), one key.
RECEIVERS = (
    *("a8.h6<v>", "a8.h10<v>", "a9.h6<q>", "a9.h9<q>", "a9.h9<k>"),
    *("a10.h0<q>", "a10.h7<q>", "a11.h10<q>"),
)
QUICK_RECEIVERS = ("a1.h0<q>", "a1.h1<k>", "a2.h2<v>", "a2.h3<q>")


# ---------------------------------------------------------------------- the rival: attribution


def forked(model: TransformerBridge) -> TransformerBridge:
    """With a residual stream of its own for each query, key and value, and each head's output."""
    model.set_use_split_qkv_input(True)
    model.set_use_attn_result(True)
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Batch:
    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    correct: Int[Tensor, "batch"]
    incorrect: Int[Tensor, "batch"]

    def rows(self, first: int, end: int) -> "Batch":
        return Batch(*(part[first:end] for part in vars(self).values()))


def batch_of(prompts: Prompts) -> Batch:
    (group,) = prompts.groups
    return Batch(group.clean, group.corrupted, group.correct, group.incorrect)


def metric(model: TransformerBridge, batch: Batch) -> Float[Tensor, "batch"]:
    logits = model(batch.clean)[:, -1]
    rows = torch.arange(len(logits))
    return logits[rows, batch.correct] - logits[rows, batch.incorrect]


class Hooks:
    """All edges' scores, summed over a batch, by hooks that keep everything."""

    def __init__(self, model: TransformerBridge, batch: Batch) -> None:
        self.model, self.batch, self.layout = model, batch, layout_of(model)
        n_senders = len(self.layout.senders)
        shape = (*batch.clean.shape, n_senders, model.cfg.d_model)
        self.differences = torch.zeros(shape)  # corrupted minus clean outputs
        self.scores = torch.zeros(n_senders, len(self.layout.receivers))
        self.embeds: list[Tensor] = []

    def senders(self, sign: int) -> list[tuple[str, Callable]]:
        """Forward hooks that add (or subtract) every sender's output."""

        def add(place: int, tensor: Tensor, hook: object) -> None:
            output = tensor.detach() if tensor.ndim == 4 else tensor.detach()[:, :, None]
            self.differences[:, :, place : place + output.shape[2]] += sign * output

        def embed(tensor: Tensor, hook: object) -> None:
            self.embeds.append(tensor.detach())
            add(0, tensor, hook)

        hooks: list[tuple[str, Callable]] = [("blocks.0.hook_in", embed)]
        for layer in range(self.layout.n_layers):
            head, mlp = Node.attention_head(layer, 0), Node.mlp(layer)
            heads = partial(add, self.layout.position(head))
            hooks.append((f"blocks.{layer}.attn.hook_result", heads))
            mlps = partial(add, self.layout.position(mlp))
            hooks.append((f"blocks.{layer}.mlp.hook_out", mlps))
        return hooks

    def receivers(self) -> list[tuple[str, Callable]]:
        """Backward hooks that multiply every receiver's gradient with the differences."""

        def multiply(first: int, gradient: Tensor, hook: object) -> None:
            gradient = gradient if gradient.ndim == 4 else gradient[:, :, None]
            before = self.layout.n_before(self.layout.receivers[first])
            self.scores[:before, first : first + gradient.shape[2]] += einsum(
                self.differences[:, :, :before], gradient, "b pos s d, b pos r d -> s r"
            )

        hooks: list[tuple[str, Callable]] = []
        place = {receiver: number for number, receiver in enumerate(self.layout.receivers)}
        for layer in range(self.layout.n_layers):
            for kind in ("q", "k", "v"):
                first = place[Receiver(kind, layer, 0)]
                hooks.append((f"blocks.{layer}.attn.hook_{kind}_input", partial(multiply, first)))
            first = place[Receiver("mlp", layer)]
            hooks.append((f"blocks.{layer}.ln2.hook_in", partial(multiply, first)))
        return [*hooks, ("ln_final.hook_in", partial(multiply, place[Receiver("logits")]))]

    def run(self, points: list[float]) -> Float[Tensor, "sender receiver"]:
        """EAP with the gradient averaged over embeddings between corrupted (0) and clean (1)."""
        with torch.no_grad(), self.model.hooks(fwd_hooks=self.senders(1)):
            self.model(self.batch.corrupted)
        if points == [1.0]:
            self.gradient(None)
        else:
            with torch.no_grad(), self.model.hooks(fwd_hooks=self.senders(-1)):
                self.model(self.batch.clean)
            corrupted, clean = self.embeds
            for point in points:
                self.gradient(corrupted + point * (clean - corrupted))
        return self.scores / len(points)

    def gradient(self, embed: Tensor | None) -> None:
        """One forward and backward pass, from ``embed`` or the clean prompt's own embedding."""

        def start(tensor: Tensor, hook: object) -> Tensor:
            return (tensor if embed is None else embed).detach().requires_grad_()

        forward = [("blocks.0.hook_in", start), *(self.senders(-1) if embed is None else [])]
        with self.model.hooks(fwd_hooks=forward, bwd_hooks=self.receivers()):
            metric(self.model, self.batch).sum().backward()


def naive_scores(
    model: TransformerBridge, batch: Batch, points: list[float], rows: int
) -> Float[Tensor, "edge"]:
    """Scores summed over prompts, in the order of ``Layout.edges``."""
    layout = layout_of(model)
    total = torch.zeros(len(layout.senders), len(layout.receivers))
    for first in range(0, len(batch.clean), rows):
        total += Hooks(model, batch.rows(first, first + rows)).run(points)
    columns = [
        total[: layout.n_before(receiver), number]
        for number, receiver in enumerate(layout.receivers)
    ]
    return torch.cat(columns)


# ---------------------------------------------------------------------- the rival: path patching


class OneEdge:
    """Path patching of edges from heads, one hooked run each, everything clean cached."""

    def __init__(self, model: TransformerBridge, batch: Batch) -> None:
        self.model, self.batch = model, batch
        clean, corrupted = self.outputs(batch.clean), self.outputs(batch.corrupted)
        self.streams = {name: clean[name] for name in clean if name.endswith("hook_in")}
        self.changes = {name: corrupted[name] - clean[name] for name in clean}
        with torch.no_grad():
            self.metric = metric(model, batch)

    def outputs(self, tokens: Tensor) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor, hook: object) -> None:
            kept[name] = tensor

        names = [
            f"blocks.{layer}.{point}"
            for layer in range(self.model.cfg.n_layers)
            for point in ("hook_in", "attn.hook_z")
        ]
        hooks = [(name, partial(keep, name)) for name in names]
        with torch.no_grad(), self.model.hooks(fwd_hooks=hooks):
            self.model(tokens)
        return kept

    @torch.no_grad()
    def effect(self, edge: Edge) -> Float[Tensor, "batch"]:
        sender, receiver = edge.sender, edge.receiver
        z = self.changes[f"blocks.{sender.layer}.attn.hook_z"][:, :, sender.head]
        change = z @ self.model.blocks[sender.layer].attn.W_O[sender.head]
        block, kind = self.model.blocks[receiver.layer], receiver.kind
        normed = block.ln1(self.streams[f"blocks.{receiver.layer}.hook_in"] + change)
        weight, bias = (getattr(block.attn, f"{name}_{kind.upper()}") for name in ("W", "b"))
        own = normed @ weight[receiver.head] + bias[receiver.head]

        def replace(tensor: Tensor, hook: object) -> Tensor:
            tensor = tensor.clone()
            tensor[:, :, receiver.head] = own
            return tensor

        point = f"blocks.{receiver.layer}.attn.{kind}.hook_out"
        with self.model.hooks(fwd_hooks=[(point, replace)]):
            return metric(self.model, self.batch) - self.metric


# ---------------------------------------------------------------------- measurements


def seconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def attribution_table(
    config: GPT2Config, n_prompts: int, rounds: int, batches: tuple[int, ...]
) -> None:
    model, plain = random_gpt2(config), forked(plain_bridge(config))
    prompts = random_prompts(config.vocab_size, n_prompts, LENGTH)
    batch = batch_of(prompts)
    print("\n| | straightforward hooks | `edge_attribution` | ratio | largest difference |")
    print("|---|---|---|---|---|")
    for method, points in (("eap", [1.0]), ("eap-ig", [(k + 0.5) / STEPS for k in range(STEPS)])):
        found: list[tuple[float, float]] = []
        worst = 0.0
        for _ in range(rounds):
            ours, result = seconds(
                lambda: edge_attribution(model, prompts, method=method, steps=STEPS).scores.sum(0)
            )
            tries = [seconds(partial(naive_scores, plain, batch, points, n)) for n in batches]
            theirs, expected = min(tries, key=lambda one: one[0])
            found.append((theirs, ours))
            worst = max(worst, float((result - expected).abs().max() / expected.abs().max()))
        theirs, ours = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(naive / own for naive, own in found)
        name = method.upper() + (f", {STEPS} steps" if method == "eap-ig" else "")
        print(
            f"| {name} | {theirs:.1f} s | {ours:.1f} s | **{ratio:.2f}** | "
            f"{worst:.0e} of the largest score |",
            flush=True,
        )


@dataclass
class Sampler:
    """Progress callback of path_patching: between its pieces, times one hooked run of an edge."""

    rival: OneEdge
    edges: list[Edge]  # by receiver, in order of computation
    receivers: list[Receiver]
    every: int
    resumed: float = field(default_factory=time.perf_counter)
    ours: dict[Receiver, float] = field(default_factory=dict)
    theirs: list[float] = field(default_factory=list)
    effects: dict[Edge, Tensor] = field(default_factory=dict)
    pieces: int = 0

    def __call__(self, _stage: str, _done: int, _total: int) -> None:
        spent = time.perf_counter() - self.resumed
        receiver = self.receivers[self.pieces % len(self.receivers)]
        self.ours[receiver] = self.ours.get(receiver, 0.0) + spent
        if self.pieces % self.every == 0:
            own = [edge for edge in self.edges if edge.receiver == receiver]
            edge = own[17 * self.pieces % len(own)]
            time_taken, self.effects[edge] = seconds(partial(self.rival.effect, edge))
            self.theirs.append(time_taken)
        self.pieces += 1
        self.resumed = time.perf_counter()


def patching_table(
    config: GPT2Config, n_prompts: int, names: tuple[str, ...], every: int, batch_size: int | None
) -> None:
    model, plain = random_gpt2(config), plain_bridge(config).requires_grad_(False)
    prompts = random_prompts(config.vocab_size, n_prompts, LENGTH)
    layout = layout_of(model)
    receivers = [receiver for receiver in layout.receivers if receiver.name in names]
    senders = [node for node in layout.senders if node.kind == "head"]
    edges = [e for e in layout.edges if e.sender in senders and e.receiver in receivers]
    sampler = Sampler(OneEdge(plain, batch_of(prompts)), edges, receivers, every)
    result = path_patching(
        model, prompts, senders, receivers, batch_size=batch_size, progress=sampler
    )
    run = statistics.mean(sampler.theirs)
    worst = max(
        float((result.effects[:, result.edges.index(edge)] - effect).abs().max())
        for edge, effect in sampler.effects.items()
    )
    print("\n| receiver | edges | one hooked run an edge | `path_patching` | ratio |")
    print("|---|---|---|---|---|")
    total = sum(sampler.ours.values())
    for receiver in receivers:
        count = sum(edge.receiver == receiver for edge in edges)
        own = sampler.ours[receiver]
        print(
            f"| {receiver} | {count} | {count * run:.0f} s | {own:.1f} s | {count * run / own:.1f} |"
        )
    theirs = len(edges) * run
    print(
        f"| **all** (wanted: 10) | {len(edges)} | {theirs:.0f} s | {total:.1f} s | "
        f"**{theirs / total:.1f}** |\n\n"
        f"One hooked run takes {run:.2f} s ({min(sampler.theirs):.2f} to {max(sampler.theirs):.2f}; "
        f"{len(sampler.theirs)} edges measured, the rest extrapolated). On these edges the largest "
        f"difference between the two is {worst:.0e} logits, the largest effect "
        f"{float(result.effects.abs().max()):.2g}.",
        flush=True,
    )


# ---------------------------------------------------------------------- memory


def memory_of_one_run(what: str, n_prompts: int, layers: int, width: int) -> None:
    """Print the peak of resident memory, in bytes, above what it is when the model is loaded."""
    config = sized(layers, width)
    ours = what == "ours"
    model = random_gpt2(config) if ours else forked(plain_bridge(config))

    def run(count: int) -> None:
        prompts = random_prompts(config.vocab_size, count, LENGTH)
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
    print(
        "\n| prompts | layers | straightforward hooks, all prompts at once | `edge_attribution` |"
    )
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
    quick = arguments.quick
    config, n_prompts = (sized(3, 32), 8) if quick else (sized(12, 768), 64)
    start = time.perf_counter()
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {config.n_layer} layers of width "
        f"{config.n_embd}, {n_prompts} x {LENGTH} tokens, {arguments.rounds} rounds"
    )
    attribution_table(config, n_prompts, arguments.rounds, (4,) if quick else (16, 64))
    if quick:
        patching_table(config, n_prompts, QUICK_RECEIVERS, 2, 4)
        memory_table([(4, 2)], 32, arguments.threads)
    else:
        patching_table(config, n_prompts, RECEIVERS, 3, None)
        sizes = [(16, 12), (64, 12), (256, 12), (64, 6), (64, 24)]
        memory_table(sizes, 768, arguments.threads)
    print(f"\nwhole run: {(time.perf_counter() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
