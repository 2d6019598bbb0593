"""Runs with many nodes ablated equal the obvious run with a hook on each of them."""

import pytest
import torch
from random_models import random_bridge, random_prompts
from slow_ablation import slow_metric

from circuitkd.circuits.ablated import NodeAblator
from circuitkd.circuits.influence import ABLATIONS
from circuitkd.errors import InputError
from circuitkd.nodes import Node


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_any_set_of_nodes_in_any_order_equals_hooks(family: str, ablation: str) -> None:
    model, prompts = random_bridge(family), random_prompts()
    runs = NodeAblator(model, prompts, ablation=ablation)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(len(runs.nodes), generator=generator) for _ in range(6)]
    sets = [{n for n, d in zip(runs.nodes, draw, strict=True) if d > 0.4} for draw in drawn]
    neighbours = [sets[-1] - {node} for node in sorted(sets[-1], key=str)]
    for kept in [set(runs.nodes), *sets, *neighbours, set()]:
        expected = slow_metric(model, prompts, kept, ablation)
        torch.testing.assert_close(runs.metric(kept), expected, atol=1e-4, rtol=0)


def test_the_batch_size_changes_nothing() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    kept = [Node.parse(name) for name in ("a0.h1", "m0", "a2.h3")]
    small = NodeAblator(model, prompts, batch_size=2).metric(kept)
    large = NodeAblator(model, prompts, batch_size=100).metric(kept)
    torch.testing.assert_close(small, large, atol=1e-5, rtol=0)


def test_an_interrupted_run_is_not_taken_for_a_finished_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = NodeAblator(random_bridge("gpt2"), random_prompts())
    everything, some = runs.metric(runs.nodes), runs.nodes[3:]
    expected = NodeAblator(random_bridge("gpt2"), random_prompts()).metric(some)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("circuitkd.circuits.engine.Replay.finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runs.metric(some)
    torch.testing.assert_close(runs.metric(some), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(runs.metric(runs.nodes), everything, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"ablation": "noise"}, "Unknown ablation"), ({"batch_size": 0}, "at least 1")],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        NodeAblator(random_bridge("gpt2"), random_prompts(), **arguments)


def test_a_node_that_is_not_the_models_is_refused() -> None:
    runs = NodeAblator(random_bridge("gpt2"), random_prompts())
    with pytest.raises(InputError, match=r"no node a9\.h0"):
        runs.metric([Node.parse("a9.h0")])
