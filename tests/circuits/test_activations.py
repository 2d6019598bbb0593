"""What similarity is computed on equals what hooks on a full run see, minus its mean."""

from typing import Any

import pytest
import torch
from random_models import random_bridge, random_gpt2, random_prompts
from transformers import GPT2LMHeadModel

from circuitkd import load_model
from circuitkd.circuits.activations import Components, gram_root, record_components
from circuitkd.errors import InputError

PLACES = [torch.tensor([[1, 4, 6]] * 5), torch.tensor([[0, 2, 4]] * 3)]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_inner_products_are_those_of_the_writes(family: str) -> None:
    """Feature rows of a head have the inner products of z W_O minus its mean, rows as stated."""
    model, prompts = random_bridge(family), random_prompts()
    parts = record_components(model, prompts, PLACES)
    for number, node in enumerate(parts.nodes):
        rows = []
        for group, places in zip(prompts.groups, PLACES, strict=True):
            outputs = []
            for tokens in (group.clean, group.means):
                _, cache = model.run_with_cache(tokens)
                if node.kind == "head":
                    z = cache[f"blocks.{node.layer}.attn.hook_z"][:, :, node.head]
                    outputs.append(z @ model.blocks[node.layer].attn.W_O[node.head])
                else:
                    outputs.append(cache[f"blocks.{node.layer}.mlp.hook_out"])
            centred = outputs[0] - outputs[1].mean(0)
            rows += [centred[b, p] for b in range(len(places)) for p in places[b]]
        slow = torch.stack(rows)
        fast = parts.features[number]
        torch.testing.assert_close(fast @ fast.T, slow @ slow.T, atol=1e-4, rtol=1e-4)


def test_rows_name_their_prompts_and_patterns_their_places() -> None:
    model, prompts = random_bridge("llama"), random_prompts()
    parts = record_components(model, prompts, PLACES)
    first, second = prompts.groups
    assert parts.row_prompt.tolist() == [
        int(i) for group in (first, second) for i in group.index for _ in range(3)
    ]
    _, cache = model.run_with_cache(first.clean)
    expected = torch.cat([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(3)], 1)
    torch.testing.assert_close(
        parts.patterns[0], expected[:, :, [1, 4, 6]][..., [1, 4, 6]], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        parts.raw_mlp[2][:3], cache["blocks.2.mlp.hook_out"][0, [1, 4, 6]], atol=1e-5, rtol=0
    )


def test_each_prompt_has_its_own_places() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts(lengths=(7,), batches=(2,))
    both = record_components(model, prompts, [torch.tensor([[1, 2], [3, 4]])])
    one = record_components(model, prompts, [torch.tensor([[1, 2], [1, 2]])])
    assert torch.equal(both.features[0][:2], one.features[0][:2])
    assert not torch.allclose(both.features[0][2:], one.features[0][2:])


def test_rotating_a_heads_inside_changes_nothing() -> None:
    """V and O of a head in another basis: another z, the same features up to their inner basis."""
    plain = record_components(load_model(random_gpt2()), random_prompts(), PLACES)
    turned = record_components(load_model(rotated_inside(random_gpt2())), random_prompts(), PLACES)
    for x, y in zip(plain.features, turned.features, strict=True):
        torch.testing.assert_close(x @ x.T, y @ y.T, atol=1e-3, rtol=1e-3)


def rotated_inside(network: GPT2LMHeadModel, head: int = 1) -> GPT2LMHeadModel:
    width = network.config.n_embd // network.config.n_head
    own = slice(head * width, (head + 1) * width)
    basis = torch.randn(width, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for layer in range(network.config.n_layer):
            block: Any = network.transformer.h[layer]
            values = slice(
                2 * network.config.n_embd + own.start, 2 * network.config.n_embd + own.stop
            )
            block.attn.c_attn.weight[:, values] = block.attn.c_attn.weight[:, values] @ basis
            block.attn.c_attn.bias[values] = block.attn.c_attn.bias[values] @ basis
            block.attn.c_proj.weight[own] = torch.linalg.inv(basis) @ block.attn.c_proj.weight[own]
    return network


def test_batch_size_changes_nothing() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    whole = record_components(model, prompts, PLACES)
    single = record_components(model, prompts, PLACES, batch_size=1)
    for x, y in zip(flat(whole), flat(single), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


def flat(parts: Components) -> list[torch.Tensor]:
    return [*parts.features, *parts.raw_mlp, *parts.patterns]


def test_gram_root_of_a_rank_deficient_matrix_is_finite() -> None:
    W_O = torch.zeros(1, 4, 6)
    W_O[0, 0] = 1.0
    root = gram_root(W_O)
    assert torch.isfinite(root).all()
    torch.testing.assert_close(root @ root.mT, W_O @ W_O.mT, atol=1e-5, rtol=0)


def test_positions_for_every_group_are_needed() -> None:
    with pytest.raises(InputError, match="2 groups"):
        record_components(random_bridge("gpt2"), random_prompts(), PLACES[:1])
