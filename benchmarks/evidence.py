"""Time of the alignment's evidence, beside the influence runs that it is made from.

    python benchmarks/evidence.py [--threads 2] [-n 100]

A random model of GPT-2 small's size as the teacher and one of DistilGPT2's as the student (12 and 6
layers of 12 heads, 768 wide), prompts of 16 tokens, all positions compared. Timed:

(a) exact influence of every head and MLP of both models, and the recording of their components;
(b) everything that is computed from them: similarities of all pairs and the transport plan, 1,000
    bootstrap draws of similarities, influences and plan, 1,000 null draws, the ceiling's 20 splits,
    for all four alignments.

Printed: both, and (b) / (a). The floor is left out: each random student costs what measuring the
student costs.
"""

import argparse
import time

import torch
from influence import random_gpt2, random_prompts
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config

from circuitkd.circuits.activations import record_components
from circuitkd.circuits.influence import node_influence
from circuitkd.compare.recorded import compare_recorded

LENGTH = 16
CONFIG = {
    "seed": 0,
    "draws": 1000,
    "null_draws": 1000,
    "random_students": 0,
    "preset": "default",
    "measure": "default",
    "positions": "all",
}


def random_model(layers: int, small: bool) -> TransformerBridge:
    """A random GPT-2 of this depth: 768 wide, or tiny."""
    if small:
        return random_gpt2(GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=100))
    return random_gpt2(GPT2Config(n_layer=layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-n", type=int, default=100, help="prompts")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {"teacher": random_model(12, options.small), "student": random_model(6, options.small)}
    prompts = random_prompts(models["teacher"].cfg.d_vocab, options.n, LENGTH)
    places = [torch.arange(LENGTH).expand(options.n, -1)]

    start = time.perf_counter()
    influences = {side: node_influence(model, prompts) for side, model in models.items()}
    components = tuple(record_components(model, prompts, places) for model in models.values())
    measured = time.perf_counter()
    a = measured - start
    print(f"{options.n} prompts of {LENGTH} tokens, {options.threads} threads")
    print(f"(a) influences and components  {a:6.1f} s", flush=True)
    compare_recorded(influences, (components[0], components[1]), CONFIG)
    b = time.perf_counter() - measured
    print(f"(b) all evidence               {b:6.1f} s    b / a = {b / a:.2f}")


if __name__ == "__main__":
    main()
