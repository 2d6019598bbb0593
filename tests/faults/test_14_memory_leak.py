"""Fault 14: models were never freed when many were made."""

import gc
import weakref

import psutil
from random_models import random_gpt2, random_prompts

from circuitkd import load_model, node_influence
from circuitkd.circuits.activations import record_components

PAIRS = 20
WIDTH = 256
SETTLED = 5


def test_memory_is_flat_over_twenty_pairs() -> None:
    resident, networks = [], []
    for seed in range(PAIRS):
        measure_pair(seed, networks)
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    assert not [network for network in networks if network() is not None]
    grown = resident[-1] - resident[SETTLED]
    assert grown < 3 * size_of_a_pair(), f"{grown / 2**20:.0f} MiB in {PAIRS - SETTLED} pairs"


def measure_pair(seed: int, networks: list[weakref.ref]) -> None:
    prompts = random_prompts(lengths=(5,), batches=(4,))
    places = [group.positions["END"][:, None] for group in prompts.groups]
    for side in (0, 1):
        model = load_model(random_gpt2(width=WIDTH, layers=2, seed=2 * seed + side))
        node_influence(model, prompts)
        record_components(model, prompts, places)
        networks.append(weakref.ref(model.original_model))


def size_of_a_pair() -> int:
    network = random_gpt2(width=WIDTH, layers=2)
    return 2 * sum(weights.nbytes for weights in network.parameters())
