"""Attention patterns at labelled positions: against hooks, whatever the lengths and tokenizers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prompt_samples import KINDS, SHIPPED
from random_models import random_bridge, random_gpt2, random_llama, random_prompts
from torch import Tensor

from circuitkd import load_model
from circuitkd.circuits.attention import REST, AttentionPatterns, attention_patterns
from circuitkd.errors import InputError
from circuitkd.prompts import PromptGroup, Prompts, tokenised


def labelled_prompts(*, bos: bool = False) -> Prompts:
    """Groups of 7 and 5 tokens; in each the labels stand elsewhere."""
    prompts = random_prompts(bos=bos)
    places = [{"A": 1, "B": 4, "END": 6}, {"A": 3, "B": 2, "END": 4}]
    groups = [
        replace(group, positions={k: torch.full((len(group),), v) for k, v in own.items()})
        for group, own in zip(prompts.groups, places, strict=True)
    ]
    return replace(prompts, groups=tuple(groups))


def hooked_patterns(model, group: PromptGroup) -> Tensor:
    with torch.no_grad():
        _, cache = model.run_with_cache(group.clean)
    layers = range(model.cfg.n_layers)
    return torch.cat([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in layers], 1)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_patterns_are_those_of_hooks_at_the_labels(family: str) -> None:
    model, prompts = random_bridge(family), labelled_prompts(bos=True)
    found = attention_patterns(model, prompts)
    assert found.labels == ("A", "B", "END")
    assert found.keys == ("A", "B", "END", "BOS", "rest")
    for number, group in enumerate(prompts.groups):
        whole = hooked_patterns(model, group)
        torch.testing.assert_close(found.groups[number], whole.mean(0), atol=1e-5, rtol=0)
        at = {label: int(place[0]) for label, place in group.positions.items()}
        for b, place in enumerate(group.index.tolist()):
            for q, query in enumerate(found.labels):
                row = whole[b, :, at[query]]
                expected = [row[:, at["A"]], row[:, at["B"]], row[:, at["END"]], row[:, 0]]
                others = [k for k in range(row.shape[1]) if k not in {0, *at.values()}]
                expected.append(row[:, others].sum(1))
                torch.testing.assert_close(
                    found.labelled[place, :, q], torch.stack(expected, 1), atol=1e-5, rtol=0
                )


def test_a_row_is_all_of_a_heads_attention() -> None:
    found = attention_patterns(random_bridge("llama"), labelled_prompts())
    assert found.keys[-1] == REST
    torch.testing.assert_close(
        found.labelled.sum(-1), torch.ones(found.labelled.shape[:-1]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(found.uniform.sum(-1), torch.ones(8, 3), atol=1e-6, rtol=0)


def test_a_head_that_looks_at_all_tokens_alike_is_the_uniform_baseline() -> None:
    found = attention_patterns(load_model(without_queries()), labelled_prompts())
    expected = found.uniform[:, None].expand_as(found.labelled)
    torch.testing.assert_close(found.labelled, expected, atol=1e-6, rtol=0)
    end_of_long = found.uniform[labelled_prompts().groups[0].index[0], 2]
    torch.testing.assert_close(
        end_of_long, torch.tensor([1 / 7, 1 / 7, 1 / 7, 4 / 7]), atol=1e-6, rtol=0
    )


def without_queries():
    network = random_gpt2()
    for name, parameter in network.named_parameters():
        if "c_attn" in name:
            parameter.data[..., : network.config.n_embd] = 0
    return network


def test_two_labels_at_one_token_are_not_counted_twice_in_the_rest() -> None:
    prompts = random_prompts(lengths=(5,), batches=(2,))
    at = {"A": torch.tensor([4, 4]), "END": torch.tensor([4, 4])}
    prompts = replace(prompts, groups=(replace(prompts.groups[0], positions=at),))
    found = attention_patterns(random_bridge("gpt2"), prompts)
    a, end, rest = found.labelled[:, :, 1].unbind(-1)
    torch.testing.assert_close(a, end)
    torch.testing.assert_close(end + rest, torch.ones_like(end), atol=1e-5, rtol=0)


def test_tokenizers_differ_but_labels_agree() -> None:
    """Other token numbers, the same texts, prompts and labels, each read at its own positions."""
    kinds = [KINDS["byte_level"], KINDS["llama_like"]]
    samples = tokenised(SHIPPED["numerals"], kinds, 6)
    networks = [
        random_gpt2(vocabulary=len(kinds[0])),
        random_llama(vocabulary=len(kinds[1]), layers=2),
    ]
    found = [
        attention_patterns(load_model(network), prompts)
        for network, prompts in zip(networks, samples, strict=True)
    ]
    lengths = [{group.clean.shape[1] for group in prompts.groups} for prompts in samples]
    assert lengths[0] != lengths[1]
    assert found[0].labels == found[1].labels == ("N1", "N2", "N3", "N4", "END")
    assert "BOS" in found[1].keys
    group = samples[1].groups[0]
    n4, n2 = (int(group.positions[label][0]) for label in ("N4", "N2"))
    whole = hooked_patterns(load_model(networks[1]), group)
    torch.testing.assert_close(
        found[1].labelled[group.index[0], :, 3, 1], whole[0, :, n4, n2], atol=1e-5, rtol=0
    )


def test_labels_that_only_some_prompts_have_are_left_out() -> None:
    prompts = labelled_prompts()
    first, second = prompts.groups
    fewer = {label: at for label, at in second.positions.items() if label != "B"}
    prompts = replace(prompts, groups=(first, replace(second, positions=fewer)))
    assert attention_patterns(random_bridge("gpt2"), prompts).labels == ("A", "END")


def test_the_frame_holds_means_and_intervals_over_prompts() -> None:
    found = attention_patterns(random_bridge("gpt2"), labelled_prompts())
    frame = found.frame
    assert len(frame) == 12 * 3 * 4
    row = frame[(frame["node"] == "a2.h3") & (frame["query"] == "B") & (frame["key"] == "A")]
    mean = float(found.labelled[:, 11, 1, 0].double().mean())
    assert row["attention"].item() == pytest.approx(mean)
    assert row["low"].item() <= mean <= row["high"].item()
    assert row["uniform"].item() == pytest.approx(float(found.uniform[:, 1, 0].double().mean()))
    assert found.table("a2.h3").loc["B", "A"] == pytest.approx(mean)


def test_batch_size_changes_nothing() -> None:
    model, prompts = random_bridge("llama"), labelled_prompts()
    whole, single = (attention_patterns(model, prompts, batch_size=size) for size in (None, 1))
    torch.testing.assert_close(whole.labelled, single.labelled, atol=1e-5, rtol=0)


def test_patterns_are_saved_and_loaded(tmp_path: Path) -> None:
    found = attention_patterns(random_bridge("gpt2"), labelled_prompts(bos=True))
    found.save(tmp_path / "patterns.safetensors")
    again = AttentionPatterns.load(tmp_path / "patterns.safetensors")
    assert torch.equal(again.labelled, found.labelled)
    assert torch.equal(again.uniform, found.uniform)
    assert all(torch.equal(a, b) for a, b in zip(again.groups, found.groups, strict=True))
    assert repr(again) == repr(found)
    assert "from END" in repr(found)


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    with pytest.raises(InputError, match="no prompts"):
        attention_patterns(model, replace(prompts, groups=()))
    bare = replace(prompts, groups=tuple(replace(g, positions={}) for g in prompts.groups))
    with pytest.raises(InputError, match="No label"):
        attention_patterns(model, bare)
    with pytest.raises(InputError, match="no saved attention"):
        AttentionPatterns.load(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"no head a9\.h0"):
        attention_patterns(model, prompts).table("a9.h0")
