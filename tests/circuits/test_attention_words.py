"""QK and OV circuits: what a whole network does when only the words matter."""

from typing import Any

import pytest
import torch
from random_models import random_gpt2, random_llama
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model
from circuitkd.circuits.attention import ov_circuit, qk_circuit
from circuitkd.errors import InputError

TOKENS = torch.tensor([7, 11, 3, 50, 29, 8])


def word_model(family: str) -> TransformerBridge:
    """No position embeddings, and nothing but MLP 0 between the embedding and layer 1."""
    network: Any = random_gpt2() if family == "gpt2" else random_llama()
    with torch.no_grad():
        if family == "gpt2":
            network.transformer.wpe.weight.zero_()
            network.transformer.h[0].attn.c_proj.weight.zero_()
            network.transformer.h[0].attn.c_proj.bias.zero_()
        else:
            network.model.layers[0].self_attn.o_proj.weight.zero_()
    return load_model(network)


def cache_of(model: TransformerBridge, tokens: Tensor) -> Any:
    with torch.no_grad():
        return model.run_with_cache(tokens[None])[1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("layer", "after_mlp0"), [(0, False), (1, True)])
def test_qk_scores_are_the_networks_own(family: str, layer: int, after_mlp0: bool) -> None:
    """Log attention of one row differs from key to key as the scores at these distances do."""
    model = word_model(family)
    pattern = cache_of(model, TOKENS)[f"blocks.{layer}.attn.hook_pattern"][0, :, -1]
    last = len(TOKENS) - 1
    for head in range(4):
        scores = torch.stack(
            [
                qk_circuit(model, layer, head, TOKENS, offset=last - key, after_mlp0=after_mlp0)[
                    last, key
                ]
                for key in range(last + 1)
            ]
        )
        torch.testing.assert_close(scores.softmax(0), pattern[head], atol=1e-5, rtol=0)
        assert pattern[head].std() > 0.01  # not flat: the test could fail


def test_rotary_scores_depend_on_the_distance_and_learned_positions_are_left_out() -> None:
    llama, gpt2 = load_model(random_llama()), load_model(random_gpt2())
    near, far = (qk_circuit(llama, 1, 2, TOKENS, offset=offset) for offset in (1, 6))
    assert (near - far).abs().max() > 0.1
    near, far = (qk_circuit(gpt2, 1, 2, TOKENS, offset=offset) for offset in (1, 6))
    torch.testing.assert_close(near, far, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_all_heads_at_once_are_the_heads_one_by_one(family: str) -> None:
    model = word_model(family)
    every = qk_circuit(model, 2, None, TOKENS, keys=[5, 6])
    assert every.shape == (4, 6, 2)
    torch.testing.assert_close(every[3], qk_circuit(model, 2, 3, TOKENS, keys=[5, 6]))
    every = ov_circuit(model, 2, None, TOKENS, outputs=[5, 6])
    assert every.shape == (4, 6, 2)
    torch.testing.assert_close(every[3], ov_circuit(model, 2, 3, TOKENS, outputs=[5, 6]))


def test_query_heads_of_a_group_share_its_keys_and_values() -> None:
    """Equal W_Q and W_O in one group: equal circuits; in two groups: different ones."""
    network: Any = random_llama()
    with torch.no_grad():
        for layer in network.model.layers:
            query = layer.self_attn.q_proj.weight.view(4, 8, 32)
            query[:] = query[0].clone()
            out = layer.self_attn.o_proj.weight.view(32, 4, 8)
            out[:] = out[:, :1].clone()
    model = load_model(network)
    for circuit in (qk_circuit, ov_circuit):
        heads = circuit(model, 1, None, TOKENS)
        torch.testing.assert_close(heads[0], heads[1])
        torch.testing.assert_close(heads[2], heads[3])
        assert (heads[1] - heads[2]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("layer", "after_mlp0"), [(0, False), (1, True)])
def test_ov_scores_are_those_of_a_token_that_is_attended_alone(
    family: str, layer: int, after_mlp0: bool
) -> None:
    """In a prompt of one token all attention is on it: z, W_O, centring, gain, unembedding."""
    model = word_model(family)
    norm = model.ln_final.original_component
    for head in range(4):
        found = ov_circuit(model, layer, head, TOKENS, after_mlp0=after_mlp0)
        for i, token in enumerate(TOKENS):
            z = cache_of(model, token[None])[f"blocks.{layer}.attn.hook_z"][0, 0].flatten()
            write = z[head * 8 : head * 8 + 8] @ model.blocks[layer].attn.W_O[head]
            if family == "gpt2":
                write = write - write.mean()
            expected = (write * norm.weight) @ model.W_U[:, TOKENS]
            torch.testing.assert_close(found[i], expected, atol=1e-4, rtol=0)


def test_a_head_that_copies_has_its_diagonal_highest() -> None:
    network: Any = random_gpt2(heads=1)
    with torch.no_grad():
        attention = network.transformer.h[1].attn
        attention.c_attn.weight[:, 64:] = torch.eye(32)
        attention.c_attn.bias[64:] = 0
        attention.c_proj.weight.copy_(torch.eye(32))
        network.transformer.wte.weight.copy_(_directions())
        network.transformer.ln_f.weight.fill_(1.0)
        network.transformer.h[1].ln_1.weight.fill_(1.0)
        network.transformer.h[1].ln_1.bias.fill_(0.0)
    scores = ov_circuit(load_model(network), 1, 0, TOKENS)
    assert torch.equal(scores.argmax(1), torch.arange(6))
    assert torch.equal((-scores).argmin(1), torch.arange(6))


def _directions() -> Tensor:
    directions = torch.randn(60, 32, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(directions)


def test_what_does_not_exist_is_refused() -> None:
    model = load_model(random_llama())
    with pytest.raises(InputError, match="layers 0 to 2"):
        qk_circuit(model, 3, 0, TOKENS)
    with pytest.raises(InputError, match="heads 0 to 3"):
        ov_circuit(model, 0, 4, TOKENS)
    with pytest.raises(InputError, match="ids from 0 to 59"):
        ov_circuit(model, 0, 0, [60])
    with pytest.raises(InputError, match="offset"):
        qk_circuit(model, 0, 0, TOKENS, offset=-1)
    with pytest.raises(InputError, match="before MLP 0"):
        qk_circuit(model, 0, 0, TOKENS, after_mlp0=True)
