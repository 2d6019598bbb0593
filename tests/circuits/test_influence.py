"""Exact influence equals the obvious loop: one fresh forward pass with one hook for each node."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_bridge, random_gpt2, random_prompts
from safetensors.torch import save_file
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import Influence, load_model, node_influence
from circuitkd.circuits.influence import ABLATIONS
from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts
from circuitkd.runs import MemoryCheckpoint

TOLERANCE = 1e-4


def slow_influence(model: TransformerBridge, prompts: Prompts, ablation: str) -> Tensor:
    """Effects [prompt, node], the slow way."""
    columns = []
    for layer in range(model.cfg.n_layers):
        for head in [*range(model.cfg.n_heads), None]:
            column = torch.zeros(len(prompts))
            for group in prompts.groups:
                clean = group_metric(model, group, prompts.metric)
                name, edit = ablating_hook(model, group, layer, head, ablation)
                with model.hooks(fwd_hooks=[(name, edit)]):
                    column[group.index] = group_metric(model, group, prompts.metric) - clean
            columns.append(column)
    return torch.stack(columns, 1)


def group_metric(model: TransformerBridge, group: PromptGroup, metric: str) -> Tensor:
    with torch.no_grad():
        logits = model(group.clean)[:, -1]
    rows = torch.arange(len(logits))
    if metric == "logit_difference":
        return logits[rows, group.correct] - logits[rows, group.incorrect]
    assert group.candidates is not None
    assert group.valid is not None
    values = []
    for row in range(len(logits)):
        p = logits[row].softmax(-1)
        good = sum(p[c] for c, v in zip(group.candidates, group.valid[row], strict=True) if v)
        bad = sum(p[c] for c, v in zip(group.candidates, group.valid[row], strict=True) if not v)
        values.append(good - bad)
    return torch.tensor(values)


def ablating_hook(
    model: TransformerBridge, group: PromptGroup, layer: int, head: int | None, ablation: str
) -> tuple[str, Callable[..., Tensor]]:
    point = "attn.hook_z" if head is not None else "mlp.hook_out"
    name = f"blocks.{layer}.{point}"
    other = group.corrupted if ablation == "resample" else group.means
    with torch.no_grad():
        _, cache = model.run_with_cache(other)
    value = cache[name]
    if ablation == "mean":
        value = value.mean(0, keepdim=True)
    if ablation == "zero":
        value = torch.zeros_like(value[:1])

    def replace(tensor: Tensor, hook: object) -> Tensor:
        if head is None:
            return value.expand_as(tensor)
        tensor = tensor.clone()
        tensor[:, :, head] = value[:, :, head]
        return tensor

    return name, replace


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_influence_equals_one_hooked_run_per_node(family: str, ablation: str, bos: bool) -> None:
    model = random_bridge(family)
    prompts = random_prompts(bos=bos)
    fast = node_influence(model, prompts, ablation=ablation).effects
    slow = slow_influence(model, prompts, ablation)
    assert slow.abs().max(0).values.min() > 100 * TOLERANCE  # every node does something
    torch.testing.assert_close(fast, slow, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_influence_is_exact_for_any_number_of_key_value_heads(kv_heads: int) -> None:
    model = random_bridge("llama", kv_heads=kv_heads)
    prompts = random_prompts()
    fast = node_influence(model, prompts, ablation="resample").effects
    torch.testing.assert_close(
        fast, slow_influence(model, prompts, "resample"), atol=TOLERANCE, rtol=0
    )


def test_probability_difference_is_measured_over_all_candidates() -> None:
    model = random_bridge("gpt2")
    prompts = random_prompts(metric="probability_difference")
    fast = node_influence(model, prompts)
    torch.testing.assert_close(
        fast.effects, slow_influence(model, prompts, "mean"), atol=TOLERANCE, rtol=0
    )
    assert fast.unit == "probability"


@pytest.mark.parametrize("layers", [1, 2])
def test_shallow_models_work(layers: int) -> None:
    model = random_bridge("gpt2", layers=layers)
    prompts = random_prompts()
    fast = node_influence(model, prompts, ablation="mean").effects
    torch.testing.assert_close(fast, slow_influence(model, prompts, "mean"), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_batch_size_changes_nothing(family: str, batch_size: int) -> None:
    model, prompts = random_bridge(family), random_prompts(batches=(7, 1))
    reference = node_influence(model, prompts).effects
    other = node_influence(model, prompts, batch_size=batch_size).effects
    torch.testing.assert_close(other, reference, atol=TOLERANCE / 10, rtol=0)


def test_prompt_order_changes_nothing_but_the_order() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    turned = [reversed_group(group) for group in prompts.groups]
    other = node_influence(model, dataclasses.replace(prompts, groups=tuple(turned[::-1])))
    reference = node_influence(model, prompts)
    torch.testing.assert_close(other.effects, reference.effects, atol=TOLERANCE / 10, rtol=0)
    torch.testing.assert_close(other.clean, reference.clean, atol=TOLERANCE / 10, rtol=0)


def reversed_group(group: PromptGroup) -> PromptGroup:
    names = ("clean", "corrupted", "correct", "incorrect", "index", "valid")
    return dataclasses.replace(group, **{name: getattr(group, name).flip(0) for name in names})


def test_a_prompt_has_the_same_effects_alone_and_among_others() -> None:
    model, prompts = random_bridge("llama"), random_prompts()
    group = prompts.groups[0]
    rows = {
        name: getattr(group, name)[:1] for name in ("clean", "corrupted", "correct", "incorrect")
    }
    alone = dataclasses.replace(
        group,
        **rows,
        index=torch.tensor([0]),
        positions={"END": group.positions["END"][:1]},
        texts=("",),
        corrupted_texts=("",),
        valid=None,
    )
    single = node_influence(model, dataclasses.replace(prompts, groups=(alone,)))
    together = node_influence(model, prompts).effects[int(group.index[0])]
    torch.testing.assert_close(single.effects[0], together, atol=TOLERANCE / 10, rtol=0)


def test_resampling_with_the_clean_prompt_itself_does_nothing() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    groups = tuple(dataclasses.replace(g, corrupted=g.clean) for g in prompts.groups)
    same = node_influence(model, dataclasses.replace(prompts, groups=groups), ablation="resample")
    assert same.effects.abs().max() < 1e-6


def test_a_silent_head_has_no_influence() -> None:
    network = random_gpt2()
    with torch.no_grad():
        block: Any = network.transformer.h[1]
        block.attn.c_proj.weight[8:16] = 0  # head 1 writes nothing
    frame = node_influence(load_model(network), random_prompts()).frame.set_index("node")
    assert frame.loc["a1.h1", "influence"] < 1e-6
    assert frame.loc["a1.h0", "influence"] > 1e-3


def test_processed_weights_give_the_same_mean_ablation() -> None:
    prompts = random_prompts()
    released = node_influence(load_model(random_gpt2()), prompts)
    processed = node_influence(load_model(random_gpt2(), processed=True), prompts)
    torch.testing.assert_close(processed.clean, released.clean, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(processed.effects, released.effects, atol=TOLERANCE, rtol=0)


def test_bfloat16_is_close_to_float32() -> None:
    prompts = random_prompts()
    exact = node_influence(load_model(random_gpt2()), prompts)
    rough = node_influence(load_model(random_gpt2().bfloat16()), prompts)
    assert np.abs(exact.share() - rough.share()).max() < 0.02


def test_a_checkpoint_continues_where_it_stopped() -> None:
    class Stops(MemoryCheckpoint):
        def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
            super().put(key, tensors)
            if len(self.parts) == 4:
                raise KeyboardInterrupt

    model, prompts = random_bridge("gpt2"), random_prompts()
    whole = node_influence(model, prompts)
    kept = Stops()
    with pytest.raises(KeyboardInterrupt):
        node_influence(model, prompts, checkpoint=kept)
    resumed = MemoryCheckpoint(dict(kept.parts))
    result = node_influence(model, prompts, checkpoint=resumed)
    assert torch.equal(result.effects, whole.effects)
    assert len(kept.parts) == 4
    assert len(resumed.parts) == 6  # two groups of three layers


def test_shares_drops_and_signs_follow_their_definitions() -> None:
    result = Influence(
        model="m",
        task="t",
        variant=None,
        bos=None,
        ablation="mean",
        metric="logit_difference",
        nodes=(Node.parse("a0.h0"), Node.parse("m0")),
        effects=torch.tensor([[-1.0, 0.5], [-2.0, 0.5]]),
        clean=torch.tensor([3.0, 2.0]),
    )
    frame = result.frame
    assert frame["effect"].tolist() == [-1.5, 0.5]
    assert frame["drop_pct"].tolist() == [60.0, -20.0]
    assert frame["share"].tolist() == [0.75, 0.25]
    assert frame["effect_low"].tolist() == [-2.0, 0.5]
    assert result.competent
    assert result.accuracy == 1.0


def test_percentages_of_an_incompetent_model_are_withheld() -> None:
    result = node_influence(random_bridge("gpt2"), random_prompts())
    weak = dataclasses.replace(result, clean=torch.tensor([1.0, -1.0] * 4))
    assert not weak.competent
    assert weak.frame["drop_pct"].isna().all()
    assert weak.frame["effect"].notna().all()
    assert "does not do this task" in repr(weak)


def test_influence_survives_saving(tmp_path) -> None:
    result = node_influence(random_bridge("gpt2"), random_prompts(bos=True))
    result.save(tmp_path / "influence.safetensors")
    loaded = Influence.load(tmp_path / "influence.safetensors")
    assert torch.equal(loaded.effects, result.effects)
    assert torch.equal(loaded.clean, result.clean)
    assert loaded.frame.equals(result.frame)
    assert (loaded.nodes, loaded.bos, loaded.ablation) == (result.nodes, "<bos>", "mean")


def test_files_that_hold_no_influence_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "influence.safetensors"
    with pytest.raises(InputError, match="no saved result"):
        Influence.load(place)
    place.write_bytes(b"not a tensor in sight")
    with pytest.raises(InputError, match="damaged"):
        Influence.load(place)
    save_file({"effects": torch.zeros(2, 2)}, place, metadata={"model": '"m"'})
    with pytest.raises(InputError, match="does not hold Influence"):
        Influence.load(place)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"ablation": "knockout"}, "mean, zero, resample"), ({"batch_size": 0}, "at least 1")],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        node_influence(random_bridge("gpt2"), random_prompts(), **arguments)


def test_progress_counts_layers_of_all_groups() -> None:
    seen: list[tuple[int, int]] = []
    node_influence(
        random_bridge("gpt2"),
        random_prompts(),
        progress=lambda stage, done, total: seen.append((done, total)),
    )
    assert seen == [(n, 6) for n in range(1, 7)]
