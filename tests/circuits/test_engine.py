"""The engine's own blocks are the network, and its hooks leave no trace."""

import pytest
import torch
from random_models import random_bridge, random_gpt2, random_prompts
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model, node_influence
from circuitkd.circuits.engine import Replay, hooked, rows_per_batch
from circuitkd.errors import ArchitectureError, HookError, InputError

TOKENS = torch.arange(1, 13).reshape(2, 6)


def hooks_on(model: TransformerBridge) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_blocks_called_alone_give_the_networks_logits(family: str) -> None:
    model = random_bridge(family)
    replay = Replay(model, TOKENS)
    stream = replay.embed(TOKENS)
    for layer in range(replay.n_layers):
        stream = replay.block(layer, stream)
    with torch.no_grad():
        expected = model(TOKENS)[:, -1]
    torch.testing.assert_close(replay.end_logits(stream[:, -1]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_short_way_to_the_end_is_the_long_way(family: str) -> None:
    model = random_bridge(family)
    replay = Replay(model, TOKENS)
    streams = [replay.embed(TOKENS)]
    for layer in range(replay.n_layers):
        streams.append(replay.block(layer, streams[-1]))
    end = streams[-1][:, -1]
    for layer in range(-1, replay.n_layers):
        short = replay.end_after_block(layer, streams[layer + 1])
        torch.testing.assert_close(short, end, atol=1e-5, rtol=0)
    for layer in range(replay.n_layers):
        seen = replay.observe(layer, streams[layer])
        same = replay.end_after_attention(layer, seen, torch.zeros_like(seen.mid)[None])
        torch.testing.assert_close(same[0], end, atol=1e-5, rtol=0)


def test_observed_parts_add_up() -> None:
    replay = Replay(random_bridge("llama"), TOKENS)
    pre = replay.embed(TOKENS)
    seen = replay.observe(0, pre, pattern=True)
    torch.testing.assert_close(seen.mid + seen.mlp, seen.post, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        pre + replay.head_writes(0, seen.z).sum(-2), seen.mid, atol=1e-5, rtol=0
    )
    assert seen.pattern is not None
    torch.testing.assert_close(seen.pattern.sum(-1), torch.ones(2, 4, 6), atol=1e-5, rtol=0)


def test_hooks_leave_no_trace_after_success_and_failure() -> None:
    model = random_bridge("gpt2")
    model(TOKENS)
    before = hooks_on(model)

    class Boom(BaseException):
        pass

    def explode(_stage: str, _done: int, _total: int) -> None:
        raise Boom

    node_influence(model, random_prompts())
    assert hooks_on(model) == before
    with pytest.raises(Boom):
        node_influence(model, random_prompts(), progress=explode)
    with pytest.raises(KeyboardInterrupt), hooked({"blocks.0.attn.hook_z": interrupt}, model):
        model(TOKENS)
    assert hooks_on(model) == before


def interrupt(_tensor: Tensor) -> None:
    raise KeyboardInterrupt


def test_a_users_own_hooks_stay() -> None:
    model = random_bridge("gpt2")
    calls = []
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: calls.append(1))
    Replay(model, TOKENS)
    assert len(calls) == 1
    model(TOKENS)
    assert len(calls) == 2


def test_a_hook_that_never_fires_is_an_error() -> None:
    model = random_bridge("gpt2")
    with (
        pytest.raises(HookError, match=r"blocks\.2.* fired 0 times"),
        hooked({"blocks.2.attn.hook_z": lambda z: None}, model),
    ):
        model(TOKENS, stop_at_layer=1)


def test_an_unknown_hook_point_is_an_error() -> None:
    model = random_bridge("gpt2")
    with (
        pytest.raises(HookError, match=r"no hook point 'blocks\.9"),
        hooked({"blocks.9.attn.hook_z": lambda z: None}, model),
    ):
        model(TOKENS)


def test_a_network_in_training_mode_is_refused() -> None:
    """With dropout every run would give other numbers."""
    model = random_bridge("gpt2", layers=1)
    model.train()
    with pytest.raises(InputError, match=r"training mode.*eval\(\)"):
        node_influence(model, random_prompts())


def test_a_network_whose_writes_do_not_sum_is_refused() -> None:
    model = load_model(random_gpt2())
    block = model.blocks[1]
    block.register_forward_hook(lambda m, a, out: 1.1 * out)
    with pytest.raises(ArchitectureError, match="residual"):
        Replay(model, TOKENS)


def test_patching_every_write_gives_the_corrupted_run() -> None:
    """All heads and MLPs of the clean run replaced, on the corrupted embedding: the other run."""
    model = random_bridge("gpt2")
    other = TOKENS.flip(0)
    replay = Replay(model, TOKENS)
    stream = corrupted = replay.embed(other)
    for layer in range(replay.n_layers):
        seen = replay.observe(layer, corrupted)
        stream = stream + (seen.mid - corrupted) + seen.mlp
        corrupted = seen.post
    torch.testing.assert_close(
        replay.end_logits(stream[:, -1]), model(other)[:, -1], atol=1e-5, rtol=0
    )


def test_batch_size_may_be_chosen() -> None:
    model = random_bridge("gpt2")
    assert rows_per_batch(model, 6, None) > 1
    assert rows_per_batch(model, 6, 5) == 5
    assert rows_per_batch(model, 10**9, None) == 1
