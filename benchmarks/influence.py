"""Speed and memory of exact node influence, as ratios measured side by side in one run.

    python benchmarks/influence.py [--threads 2] [--rounds 1]

On a random model of GPT-2 small's size, 64 prompts of 23 tokens, mean ablation:

(a) naive loop: for each node a fresh forward pass with one hook, means cached, all logits;
(b) published procedure: the same, with the means computed anew for each node;
(c) circuitkd.node_influence, all nodes.

(a) and (b) run a TransformerBridge as TransformerLens makes it, (c) one that circuitkd loads; both
have the same weights. (c) is run whole, and stops its clock after every layer for (a) and (b) to
measure one node of that layer, so that a change of the machine's speed hits all three alike. (a)
and (b) cost the same for every node and are scaled to all of them. Also printed: the largest
difference between (a) and (c), achieved GEMM throughput over the machine's measured peak, and peak
memory over what model, residual stream and one batch take.
"""

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

import circuitkd as ckd
from circuitkd.circuits.engine import rows_per_batch
from circuitkd.models import component_nodes_of
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

PROMPTS, LENGTH = 64, 23


def random_network(config: GPT2Config) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def random_gpt2(config: GPT2Config) -> TransformerBridge:
    """A random model, loaded as a released one would be."""
    with tempfile.TemporaryDirectory() as directory:
        random_network(config).save_pretrained(directory)
        return ckd.load_model(directory)


def plain_bridge(config: GPT2Config) -> TransformerBridge:
    """The same model as TransformerLens alone makes it."""
    network = random_network(config)
    bridge = build_bridge_from_module(network, "GPT2LMHeadModel", hf_config=network.config)
    return bridge.eval()


def random_prompts(vocabulary: int, n_prompts: int = PROMPTS, length: int = LENGTH) -> Prompts:
    draw = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(vocabulary, shape, generator=draw)

    group = PromptGroup(
        template=0,
        clean=tokens(n_prompts, length),
        corrupted=tokens(n_prompts, length),
        correct=tokens(n_prompts),
        incorrect=tokens(n_prompts),
        positions={"END": torch.full((n_prompts,), length - 1)},
        texts=("",) * n_prompts,
        corrupted_texts=("",) * n_prompts,
        index=torch.arange(n_prompts),
        means=tokens(n_prompts, length),
        candidates=None,
        valid=None,
    )
    return Prompts(
        task="random",
        variant=None,
        metric="logit_difference",
        bos=None,
        seed=0,
        groups=(group,),
        source=None,
    )


def hook_of(node: Node) -> str:
    return f"blocks.{node.layer}." + ("attn.hook_z" if node.kind == "head" else "mlp.hook_out")


@torch.no_grad()
def means_of(model: TransformerBridge, group: PromptGroup) -> dict[str, torch.Tensor]:
    """Mean of every z and MLP output over the corrupted prompts, position by position."""
    names = {hook_of(node) for node in component_nodes_of(model)}
    means: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(tensor: torch.Tensor, hook: object) -> None:
            means[name] = tensor.mean(0, keepdim=True)

        return hook

    with model.hooks(fwd_hooks=[(name, keep(name)) for name in names]):
        model(group.means)
    return means


@torch.no_grad()
def metric(model: TransformerBridge, group: PromptGroup) -> torch.Tensor:
    logits = model(group.clean)[:, -1]
    rows = torch.arange(len(logits))
    return logits[rows, group.correct] - logits[rows, group.incorrect]


def ablated(
    model: TransformerBridge, group: PromptGroup, node: Node, means: dict[str, torch.Tensor]
) -> torch.Tensor:
    mean = means[hook_of(node)]

    def replace(tensor: torch.Tensor, hook: object) -> torch.Tensor:
        if node.head is None:
            return mean.expand_as(tensor)
        tensor = tensor.clone()
        tensor[:, :, node.head] = mean[:, :, node.head]
        return tensor

    with model.hooks(fwd_hooks=[(hook_of(node), replace)]):
        return metric(model, group)


def peak_flops() -> float:
    """Floating-point operations a second of a large matrix product, the best of several."""
    a, b = torch.randn(1536, 3072), torch.randn(3072, 3072)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] / best


def gemm_flops(model: TransformerBridge) -> float:
    """Matrix products that node influence needs, counted from what the engine runs."""
    cfg = model.cfg
    tokens = PROMPTS * LENGTH
    mlp = 2 * tokens * 2 * cfg.d_model * (cfg.d_mlp or 0)
    attention = 2 * tokens * 4 * cfg.d_model**2
    total = 0.0
    for layer in range(cfg.n_layers):
        later = cfg.n_layers - 1 - layer
        after = max(later - 1, 0) * (mlp + attention) + (later > 0) * (attention + mlp / LENGTH)
        own = mlp if later else mlp / LENGTH
        total += cfg.n_heads * (own + after) + after
        total += 2 * (mlp + attention) + 2 * tokens * cfg.d_model**2  # two streams, head writes
    return total


def memory_bytes(what: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak since the last reset), Linux only."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(what))


def reset_peak() -> None:
    """Give freed memory back to the system, and let VmHWM begin at what is then in use."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


@dataclass
class Rivals:
    """Progress callback of (c): after each layer, times (a) and (b) on one of its nodes."""

    model: TransformerBridge
    group: PromptGroup
    clean: torch.Tensor
    means: dict[str, torch.Tensor]
    naive: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    changes: dict[Node, torch.Tensor] = field(default_factory=dict)
    ours: float = 0.0
    peak: int = 0
    resumed: float = 0.0

    def start(self) -> None:
        reset_peak()
        self.resumed = time.perf_counter()

    def __call__(self, _stage: str, done: int, _total: int) -> None:
        self.ours += time.perf_counter() - self.resumed
        self.peak = max(self.peak, memory_bytes("VmHWM"))
        layer, heads = done - 1, self.model.cfg.n_heads
        node = Node.mlp(layer) if done % 6 == 0 else Node.attention_head(layer, 5 * layer % heads)
        start = time.perf_counter()
        self.changes[node] = ablated(self.model, self.group, node, self.means) - self.clean
        self.naive.append(time.perf_counter() - start)
        start = time.perf_counter()
        ablated(self.model, self.group, node, means_of(self.model, self.group))
        self.published.append(time.perf_counter() - start)
        self.start()


def memory(model: TransformerBridge, used: int) -> str:
    parameters = model.original_model.parameters()
    weights = {weight.data_ptr(): weight.numel() * weight.element_size() for weight in parameters}
    cfg = model.cfg
    stream = cfg.n_layers * PROMPTS * LENGTH * cfg.d_model * 4
    rows = rows_per_batch(model, LENGTH, None)
    batch = rows * LENGTH * (2 * (cfg.d_mlp or 0) + 6 * cfg.d_model) * 4
    allowed = sum(weights.values()) + stream + batch
    mega = 1 / 2**20
    return (
        f"peak resident memory of node_influence, above the libraries' own: {used * mega:.0f} MiB; "
        f"model {sum(weights.values()) * mega:.0f} + residual stream {stream * mega:.0f} + one "
        f"batch {batch * mega:.0f} = {allowed * mega:.0f} MiB; ratio {used / allowed:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {PROMPTS} x {LENGTH} tokens")

    tiny = random_gpt2(GPT2Config(n_layer=1, n_embd=48))
    ckd.node_influence(tiny, random_prompts(tiny.cfg.d_vocab))  # loads what libraries load late
    plain = plain_bridge(GPT2Config())
    reset_peak()
    before = memory_bytes("VmRSS")
    model = random_gpt2(GPT2Config())
    prompts = random_prompts(model.cfg.d_vocab)
    group, nodes = prompts.groups[0], component_nodes_of(model)
    for number in range(arguments.rounds):
        rivals = Rivals(plain, group, metric(plain, group), means_of(plain, group))
        rivals.start()
        effects = ckd.node_influence(model, prompts, progress=rivals).effects
        report(rivals, effects, nodes, number + 1)
        peak = peak_flops()
        achieved = gemm_flops(model) / rivals.ours
        print(
            f"  GEMM throughput {achieved / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s peak "
            f"({100 * achieved / peak:.0f} %)"
        )
        print(f"  {memory(model, rivals.peak - before)}")


def report(rivals: Rivals, effects: torch.Tensor, nodes: tuple[Node, ...], number: int) -> None:
    naive = len(nodes) * statistics.mean(rivals.naive)
    published = len(nodes) * statistics.mean(rivals.published)
    worst = max(
        float((change - effects[:, nodes.index(node)]).abs().max())
        for node, change in rivals.changes.items()
    )
    print(
        f"round {number}: (a) naive loop {naive:.0f} s, (b) published procedure {published:.0f} s, "
        f"(c) ours {rivals.ours:.0f} s\n"
        f"  a/c {naive / rivals.ours:.2f} (wanted 3.5), b/c {published / rivals.ours:.2f} "
        f"(wanted 7); largest difference between (a) and (c) {worst:.0e} logits"
    )


if __name__ == "__main__":
    main()
