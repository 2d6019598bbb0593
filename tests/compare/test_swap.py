"""The causal check of a match: known answers, and the same by hooks and a full-width map."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from competent_models import answered_by
from random_models import FAMILIES, random_bridge, random_gpt2, random_llama, random_prompts
from slow_swap import Pair, slow_swap
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import circuitkd as ckd
from circuitkd.compare.swap import SwapTest, best_map, strongest_matches, swap_test
from circuitkd.errors import InputError
from circuitkd.models import component_nodes_of, load_model
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts


def prompts_for(model: TransformerBridge, *, lengths=(7, 5), batches=(160, 96)) -> Prompts:
    """Prompts of which the model does well, so that ablating a part has an effect on average."""
    return answered_by(model, random_prompts(lengths=lengths, batches=batches))


# Known answers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_survives_in_its_own_place(family: str) -> None:
    model = random_bridge(family)
    prompts = prompts_for(model)
    own = [(node, node) for node in component_nodes_of(model)]
    found = swap_test(model, model, (prompts, prompts), own, controls=3)
    testable = found.frame.dropna(subset="survived")
    assert len(testable) > len(own) / 2
    for column in ("survived", "survived_low", "survived_high", "explained"):
        assert testable[column].tolist() == pytest.approx([1.0] * len(testable), abs=2e-3)
    # With some rivals nearly as good, the prompts cannot always tell.
    assert testable["verified"].mean() > 0.8


def rotated(model: Any, seed: int = 0) -> Any:
    """A Llama whose residual stream is turned, whose heads are in another order, and whose logits
    are the same."""
    turned = copy.deepcopy(model)
    width, heads = model.config.hidden_size, model.config.num_attention_heads
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    order = torch.arange(heads).flip(0)
    kv_order = torch.arange(model.config.num_key_value_heads).flip(0)
    with torch.no_grad():
        for old, new in zip(model.model.layers, turned.model.layers, strict=True):
            # A norm's gain does not commute with a rotation: it moves into what reads the norm.
            attention, gain = new.self_attn, old.input_layernorm.weight
            for name, blocks in (("q_proj", order), ("k_proj", kv_order), ("v_proj", kv_order)):
                weight = getattr(old.self_attn, name).weight * gain @ Q
                getattr(attention, name).weight.copy_(permuted(weight, blocks))
            attention.o_proj.weight.copy_(Q.T @ permuted(old.self_attn.o_proj.weight.T, order).T)
            for name in ("gate_proj", "up_proj"):
                weight = getattr(old.mlp, name).weight * old.post_attention_layernorm.weight
                getattr(new.mlp, name).weight.copy_(weight @ Q)
            new.mlp.down_proj.weight.copy_(Q.T @ old.mlp.down_proj.weight)
            new.input_layernorm.weight.fill_(1)
            new.post_attention_layernorm.weight.fill_(1)
        turned.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ Q)
        turned.lm_head.weight.copy_(model.lm_head.weight * model.model.norm.weight @ Q)
        turned.model.norm.weight.fill_(1)
    return turned


def permuted(rows: Tensor, order: Tensor) -> Tensor:
    return rows.unflatten(0, (len(order), -1))[order].flatten(0, 1)


def test_a_rotated_copy_with_its_heads_permuted_survives() -> None:
    network = random_llama()
    teacher, student = load_model(network), load_model(rotated(network))
    prompts = prompts_for(teacher)
    with torch.no_grad():
        tokens = prompts.groups[0].clean
        torch.testing.assert_close(student(tokens), teacher(tokens), atol=1e-4, rtol=0)
    last = teacher.cfg.n_heads - 1
    moved = [
        (
            node,
            node if node.head is None else Node.attention_head(node.layer or 0, last - node.head),
        )
        for node in component_nodes_of(teacher)
    ]
    found = swap_test(teacher, student, (prompts, prompts), moved, controls=3)
    frame = found.frame.dropna(subset="survived")
    assert frame["survived"].tolist() == pytest.approx([1.0] * len(frame), abs=2e-3)
    assert frame["explained"].tolist() == pytest.approx([1.0] * len(frame), abs=2e-3)
    assert frame["verified"].mean() > 0.8


def test_a_wrong_component_does_not_survive() -> None:
    """The student is the teacher with another head in the place of the right one."""
    model = random_bridge("gpt2")
    prompts = prompts_for(model)
    right = swap_test(model, model, (prompts, prompts), [("a1.h0", "a1.h0")]).frame.iloc[0]
    assert right["damage_low"] > 0
    assert right["verified"]
    assert right["beaten"] == right["controls"] == 10
    wrong = [("a1.h0", other.name) for other in component_nodes_of(model) if other.kind == "head"]
    wrong.remove(("a1.h0", "a1.h0"))
    found = swap_test(model, model, (prompts, prompts), wrong, controls=11).frame
    assert not found["verified"].any()
    assert (found["survived"] < 0.6).all()
    # The right one is among the random ones, and is the best of them.
    assert found["control_best"].tolist() == pytest.approx([1.0] * len(found), abs=1e-3)


def test_a_random_student_is_not_verified() -> None:
    teacher, student = random_bridge("gpt2", seed=0), random_bridge("gpt2", seed=1)
    prompts = prompts_for(teacher)
    pairs = [(node, node) for node in component_nodes_of(teacher)]
    found = swap_test(teacher, student, (prompts, prompts), pairs)
    assert len(found.verified) <= 2


def test_twins_are_verified_though_each_is_the_others_rival() -> None:
    """A student whose head 0 was split into two half-strength copies, 0 and 1."""
    network: Any = random_gpt2()
    network.transformer.h[1].attn.c_proj.weight.data[:8] /= 2
    attention = network.transformer.h[1].attn
    width, d_head = 32, 8
    for start in (0, width, 2 * width):  # queries, keys, values of head 1 become those of head 0
        columns = slice(start + d_head, start + 2 * d_head)
        source = slice(start, start + d_head)
        attention.c_attn.weight.data[:, columns] = attention.c_attn.weight.data[:, source]
        attention.c_attn.bias.data[columns] = attention.c_attn.bias.data[source]
    attention.c_proj.weight.data[d_head : 2 * d_head] = attention.c_proj.weight.data[:d_head]
    student = load_model(network)
    whole: Any = copy.deepcopy(network)
    whole.transformer.h[1].attn.c_proj.weight.data[:d_head] *= 2
    whole.transformer.h[1].attn.c_proj.weight.data[d_head : 2 * d_head] = 0
    teacher = load_model(whole)
    prompts = prompts_for(teacher)
    pairs = [("a1.h0", "a1.h0"), ("a1.h0", "a1.h1")]
    frame = swap_test(teacher, student, (prompts, prompts), pairs, controls=11).frame
    assert frame["survived"].tolist() == pytest.approx([1.0, 1.0], abs=1e-3)
    assert frame["control_best"].tolist() == pytest.approx([1.0, 1.0], abs=1e-3)
    assert frame["beaten"].tolist() == [10, 10]
    assert frame["verified"].all()


def test_where_ablation_does_nothing_there_is_nothing_to_restore() -> None:
    network: Any = random_gpt2()
    network.transformer.h[1].attn.c_proj.weight.data[:8] = 0  # head 1.0 writes nothing
    model = load_model(network)
    prompts = prompts_for(model)
    found = swap_test(model, model, (prompts, prompts), [("a1.h0", "a1.h1")])
    row = found.frame.iloc[0]
    assert row["damage"] == pytest.approx(0, abs=1e-5)
    for column in ("survived", "survived_low", "control_mean", "control_best"):
        assert np.isnan(row[column])
    assert not row["verified"]
    assert "no effect to restore" in repr(found)


def test_without_a_rival_nothing_is_verified() -> None:
    model = random_bridge("gpt2", layers=1)
    prompts = prompts_for(model)
    row = swap_test(model, model, (prompts, prompts), [("m0", "m0")]).frame.iloc[0]
    assert row["survived"] == pytest.approx(1, abs=1e-3)
    assert row["controls"] == 0
    assert not row["verified"]


def swapped_by_hand(restored: list[float], damage: float, spread: float = 0.0) -> SwapTest:
    """Metrics of 16 prompts; ``restored``: what the match and its rivals give back, in logits."""
    wave = torch.linspace(-1, 1, 16)
    ablated = torch.ones(16)
    return SwapTest(
        teacher="big",
        student="small",
        task="numerals",
        metric="logit_difference",
        matches=((Node.mlp(0), Node.mlp(1)),),
        controls=(tuple(Node.mlp(2 + k) for k in range(len(restored) - 1)),),
        explained=(0.5,),
        clean=ablated + damage + spread * wave,
        ablated=ablated[None],
        swapped=(torch.stack([ablated + own for own in restored]),),
    )


def test_the_frame_by_hand() -> None:
    row = swapped_by_hand([1.0, 0.5, 0.25], damage=2.0).frame.iloc[0]
    assert row["damage"] == 2
    found = [row[name] for name in ("survived", "survived_low", "survived_high")]
    assert found == pytest.approx([0.5] * 3)
    assert row["control_mean"] == pytest.approx(0.1875)
    assert row["control_best"] == pytest.approx(0.25)
    assert (row["controls"], row["beaten"], row["verified"]) == (2, 2, True)


def test_a_damage_that_may_be_none_says_nothing() -> None:
    row = swapped_by_hand([0.1, 0.0], damage=0.1, spread=1.0).frame.iloc[0]
    assert row["damage_low"] < 0 < row["damage_high"]
    assert np.isnan(row["survived"])
    assert (row["beaten"], row["verified"]) == (0, False)


def test_a_component_that_hinders_is_matched_by_one_that_hinders() -> None:
    right = swapped_by_hand([-2.0, 0.0], damage=-2.0).frame.iloc[0]
    assert right["survived"] == pytest.approx(1)
    assert right["verified"]
    wrong = swapped_by_hand([1.0, -0.5], damage=-2.0).frame.iloc[0]
    assert wrong["survived"] == pytest.approx(-0.5)
    assert (wrong["beaten"], wrong["verified"]) == (0, False)


def test_better_than_every_rival_is_not_enough_if_it_is_worse_than_the_mean() -> None:
    row = swapped_by_hand([-0.5, -1.0, -2.0], damage=2.0).frame.iloc[0]
    assert (row["beaten"], row["verified"]) == (2, False)


# The same by hooks, with a map between whole residual streams

SLOW = [("a0.h1", "a1.h2"), ("a2.h3", "a0.h0"), ("m0", "m1"), ("m2", "m0")]


def assert_equal_to_slow(teacher, student, pair: Pair, matches=SLOW) -> None:
    found = swap_test(teacher, student, pair, matches, controls=1)
    for k, (ours, theirs) in enumerate(found.matches):
        ablated, swapped = slow_swap(teacher, student, pair, ours, theirs)
        torch.testing.assert_close(found.ablated[k], ablated, atol=1e-4, rtol=0)
        torch.testing.assert_close(found.swapped[k][0], swapped, atol=1e-4, rtol=0)
        assert (ablated - swapped).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_hooks_and_a_full_width_map(family: str) -> None:
    teacher = random_bridge(family, seed=0)
    student = random_bridge(family, layers=2, seed=1)
    prompts = random_prompts(batches=(48, 40))
    assert_equal_to_slow(teacher, student, (prompts, prompts))


@pytest.mark.parametrize(("width", "heads"), [(16, 4), (48, 6)])
def test_equals_hooks_for_students_of_another_width(width: int, heads: int) -> None:
    """For a wider student, a head: of an MLP the padded problem has no unique best map."""
    teacher = random_bridge("gpt2", seed=0)
    student = random_bridge("llama", layers=2, width=width, heads=heads, seed=1)
    prompts = random_prompts(batches=(48, 40))
    assert_equal_to_slow(teacher, student, (prompts, prompts), SLOW if width < 32 else SLOW[:2])


def test_where_texts_are_cut_differently_only_labelled_positions_are_swapped() -> None:
    teacher, student = random_bridge("gpt2", seed=0), random_bridge("gpt2", seed=1)
    pair = random_prompts(lengths=(7,), batches=(60,)), random_prompts(lengths=(9,), batches=(60,))
    labels = ({"A": 2, "END": 6}, {"A": 3, "END": 8})
    ours, theirs = (
        replace(
            prompts,
            groups=tuple(
                replace(
                    group,
                    index=torch.arange(60),
                    positions={name: torch.full((60,), at) for name, at in own.items()},
                )
                for group in prompts.groups
            ),
        )
        for prompts, own in zip(pair, labels, strict=True)
    )
    assert_equal_to_slow(teacher, student, (ours, theirs), SLOW[:2])


def test_the_batch_size_changes_nothing() -> None:
    teacher, student = random_bridge("gpt2", seed=0), random_bridge("gpt2", seed=1)
    prompts = random_prompts(batches=(8, 8))
    whole, single = (
        swap_test(teacher, student, (prompts, prompts), SLOW[1:3], controls=1, batch_size=size)
        for size in (None, 3)
    )
    torch.testing.assert_close(single.ablated, whole.ablated, atol=1e-4, rtol=0)
    torch.testing.assert_close(single.clean, whole.clean, atol=1e-4, rtol=0)
    for one, other in zip(single.swapped, whole.swapped, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


# The map


class TestMap:
    def test_a_rotation_scale_is_found(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(60, 5, generator=generator)
        Q = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0][:5]
        found = best_map(x, 3 * x @ Q)
        assert found.scale == pytest.approx(3, abs=1e-5)
        assert found.explained == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(found.rotation.float(), Q, atol=1e-5, rtol=0)

    def test_no_other_isometry_or_scale_comes_closer(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(40, d, generator=generator) for d in (4, 6))
        found = best_map(x, y)
        best = (y - found(x)).square().sum()
        assert found.explained == pytest.approx(float(1 - best / y.square().sum()), abs=1e-6)
        for _ in range(50):
            turn = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0][:4]
            moved = x @ turn
            scale = (moved * y).sum() / moved.square().sum()
            assert (y - scale * moved).square().sum() > best
        for scale in (0.9, 1.1):
            assert (y - scale * found(x)).square().sum() > best

    def test_directions_that_were_never_seen_are_not_mapped(self) -> None:
        x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
        x[:, 3] = 0
        found = best_map(x, x)
        torch.testing.assert_close(found(x), x, atol=1e-5, rtol=0)
        assert found(torch.tensor([[0.0, 0, 0, 1]])).abs().max() < 1e-6

    @pytest.mark.parametrize("empty", ["source", "target"])
    def test_nothing_is_mapped_to_nothing(self, empty: str) -> None:
        x, zeros = torch.randn(10, 3), torch.zeros(10, 3)
        found = best_map(zeros, x) if empty == "source" else best_map(x, zeros)
        assert found.scale == found.explained == 0
        assert (found(torch.ones(2, 3)) == 0).all()


# What goes in and comes out


@pytest.mark.slow
def test_the_strongest_matches_of_a_comparison_are_its_default() -> None:
    models = ckd.load_model("tiny-teacher"), ckd.load_model("tiny-student")
    result = ckd.compare(*models, "weekdays", n=8, draws=0)
    matches = strongest_matches(result, top=2)
    best = result.matches.iloc[0]
    assert matches[0] == (Node.parse(best["teacher"]), Node.parse(best["student"]))
    assert all(ours.kind == theirs.kind for ours, theirs in matches)
    both = ckd.load_task("weekdays").sample_pair(*models, n=16, seed=1)
    found = swap_test(*models, both, result, controls=0)
    assert found.matches[:2] == tuple(matches)
    assert len(found.matches) == 10
    assert found.frame["survived"][0] > 0.8


def test_rivals_are_other_components_of_the_kind_and_depend_on_the_seed() -> None:
    model = random_bridge("gpt2")
    prompts = random_prompts(batches=(8, 8))
    one, again, other = (
        swap_test(model, model, (prompts, prompts), SLOW[:3], controls=4, seed=seed)
        for seed in (0, 0, 1)
    )
    assert one.controls == again.controls != other.controls
    for (_, theirs), rivals in zip(one.matches, one.controls, strict=True):
        assert theirs not in rivals
        assert {node.kind for node in rivals} == {theirs.kind}
        assert len(set(rivals)) == len(rivals) == (4 if theirs.kind == "head" else 2)


@pytest.mark.parametrize(
    ("matches", "words"),
    [
        ([], "no matches"),
        ([("a9.h0", "a0.h0")], "no head or MLP a9.h0"),
        ([("a0.h0", "input")], "no head or MLP input"),
        ([("a0.h0", "m0")], "a head and an MLP"),
        ([("nonsense", "m0")], "not a node"),
    ],
)
def test_wrong_matches(matches: list, words: str) -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    with pytest.raises(InputError, match=words):
        swap_test(model, model, (prompts, prompts), matches)


def test_wrong_prompts_and_controls() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    few, own = prompts.take(range(4)), [("m0", "m0")]
    for pair in ((few, few), (prompts, few)):
        with pytest.raises(InputError, match="8 prompts or more"):
            swap_test(model, model, pair, own)
    with pytest.raises(InputError, match="controls=-1"):
        swap_test(model, model, (prompts, prompts), own, controls=-1)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    model = random_bridge("gpt2")
    prompts = prompts_for(model, batches=(10, 6))
    found = swap_test(model, model, (prompts, prompts), SLOW, controls=2)
    found.save(tmp_path / "swap.safetensors")
    again = SwapTest.load(tmp_path / "swap.safetensors")
    assert repr(again) == repr(found)
    assert again.matches == found.matches
    assert again.controls == found.controls
    assert again.frame.equals(found.frame)
    with pytest.raises(InputError, match="no saved result"):
        SwapTest.load(tmp_path / "none")
