"""Fault 2: ids that no prompt holds (padding, special tokens) took part in a number."""

import pytest
import torch
from random_models import VOCABULARY, random_gpt2, random_llama, random_prompts

from circuitkd import load_model, node_influence
from circuitkd.prompts import Prompts

MAKE = {"gpt2": random_gpt2, "llama": random_llama}


@pytest.mark.parametrize("family", MAKE)
def test_rows_of_unused_ids_change_no_number(family: str) -> None:
    prompts = random_prompts()
    unused = [i for i in range(VOCABULARY) if i not in ids_of(prompts)]
    assert unused
    plain, changed = MAKE[family](), MAKE[family]()
    with torch.no_grad():
        for weights in (changed.get_input_embeddings(), changed.get_output_embeddings()):
            weights.weight[unused] += 10
    assert_same(plain, changed, prompts)


@pytest.mark.parametrize("family", MAKE)
def test_a_padding_id_that_prompts_do_hold_is_a_token_like_any_other(family: str) -> None:
    prompts = random_prompts()
    often = int(prompts.groups[0].clean.flatten().mode().values)
    plain, padded = MAKE[family](), MAKE[family]()
    padded.config.pad_token_id = often
    padded.config.eos_token_id = often
    assert_same(plain, padded, prompts)


def ids_of(prompts: Prompts) -> set[int]:
    names = ("clean", "corrupted", "means", "correct", "incorrect")
    return {
        i for g in prompts.groups for name in names for i in getattr(g, name).flatten().tolist()
    }


def assert_same(one, other, prompts: Prompts) -> None:
    results = [node_influence(load_model(network), prompts) for network in (one, other)]
    torch.testing.assert_close(results[0].clean, results[1].clean, atol=1e-5, rtol=0)
    torch.testing.assert_close(results[0].effects, results[1].effects, atol=1e-5, rtol=0)
