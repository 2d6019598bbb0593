"""Speed and memory of exact node influence, as ratios measured side by side in one run.

    python benchmarks/influence.py [--threads 2] [--nodes 24]

On a random model of GPT-2 small's size, 64 prompts of 23 tokens, mean ablation:

(a) naive loop: for each node a fresh forward pass with one hook, means cached, all logits;
(b) published procedure: the same, with the means computed anew for each node;
(c) circuitkd.node_influence, all nodes.

(a) and (b) are timed on every k-th node of the model and scaled to all nodes; (c) is timed whole.
The three alternate, so that a change of the machine's speed hits all of them. Also printed: the
largest difference between (a) and (c), achieved GEMM throughput over the machine's measured peak,
and peak memory over what model, residual stream and one batch take.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel

import circuitkd as ckd
from circuitkd.circuits.engine import rows_per_batch
from circuitkd.models import component_nodes_of
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

PROMPTS, LENGTH = 64, 23


def random_gpt2(config: GPT2Config) -> TransformerBridge:
    """A random model, loaded as a released one would be."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        GPT2LMHeadModel(config).save_pretrained(directory)
        return ckd.load_model(directory)


def random_prompts(vocabulary: int) -> Prompts:
    draw = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(vocabulary, shape, generator=draw)

    group = PromptGroup(
        template=0,
        clean=tokens(PROMPTS, LENGTH),
        corrupted=tokens(PROMPTS, LENGTH),
        correct=tokens(PROMPTS),
        incorrect=tokens(PROMPTS),
        positions={"END": torch.full((PROMPTS,), LENGTH - 1)},
        texts=("",) * PROMPTS,
        corrupted_texts=("",) * PROMPTS,
        index=torch.arange(PROMPTS),
        means=tokens(PROMPTS, LENGTH),
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
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


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
    parser.add_argument("--nodes", type=int, default=26, help="nodes timed for (a) and (b)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {PROMPTS} x {LENGTH} tokens")

    ckd.node_influence(
        tiny := random_gpt2(GPT2Config(n_layer=1, n_embd=48)), random_prompts(tiny.cfg.d_vocab)
    )
    before = memory_bytes("VmRSS")
    model = random_gpt2(GPT2Config())
    prompts = random_prompts(model.cfg.d_vocab)
    group = prompts.groups[0]
    gc.collect()
    reset_peak()
    ours = ckd.node_influence(model, prompts)
    print(memory(model, memory_bytes("VmHWM") - before))

    nodes = component_nodes_of(model)
    step = len(nodes) / arguments.nodes
    chosen = [nodes[int((i + 0.5) * step)] for i in range(arguments.nodes)]
    clean, means = metric(model, group), means_of(model, group)
    worst = max(
        float(
            (ablated(model, group, n, means) - clean - ours.effects[:, nodes.index(n)]).abs().max()
        )
        for n in chosen[:: max(1, len(chosen) // 8)]
    )
    print(f"largest difference between (a) and (c): {worst:.1e} logits")

    naive, published, fast = [], [], []
    for number in range(arguments.rounds):
        part = chosen[number :: arguments.rounds]
        scale = len(nodes) / len(part)
        naive.append(scale * seconds(lambda p=part: [ablated(model, group, n, means) for n in p]))
        fast.append(seconds(lambda: ckd.node_influence(model, prompts)))
        published.append(
            scale
            * seconds(lambda p=part: [ablated(model, group, n, means_of(model, group)) for n in p])
        )
        print(
            f"round {number + 1}: (a) {naive[-1]:.0f} s, (b) {published[-1]:.0f} s, "
            f"(c) {fast[-1]:.0f} s; "
            f"a/c {naive[-1] / fast[-1]:.2f}, b/c {published[-1] / fast[-1]:.2f}"
        )
    a_over_c = statistics.median(a / c for a, c in zip(naive, fast, strict=True))
    b_over_c = statistics.median(b / c for b, c in zip(published, fast, strict=True))
    print(f"median: naive loop / ours {a_over_c:.2f}, published procedure / ours {b_over_c:.2f}")
    achieved, peak = gemm_flops(model) / min(fast), peak_flops()
    print(
        f"GEMM throughput {achieved / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s peak "
        f"({100 * achieved / peak:.0f} %)"
    )


if __name__ == "__main__":
    main()
