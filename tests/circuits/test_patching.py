"""Path patching equals the obvious loop: one edge a run, with explicit hooks."""

import dataclasses

import pytest
import torch
from circuits.slow_patching import slow_effect, slow_patched_logits
from random_models import random_bridge, random_gpt2, random_prompts
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model, node_influence
from circuitkd.circuits.attribution import EdgeScores
from circuitkd.circuits.edges import Edge, edges_of, layout_of
from circuitkd.circuits.patching import MODES, EdgeEffects, EdgePatcher, patched_run, path_patching
from circuitkd.errors import InputError
from circuitkd.metrics import logit_difference
from circuitkd.prompts import Prompts
from circuitkd.runs import MemoryCheckpoint

TOLERANCE = 1e-4
MODELS = [("gpt2", 4), ("llama", 2), ("llama", 1)]


def model_of(family: str, kv_heads: int, layers: int = 3) -> TransformerBridge:
    grouping = {"kv_heads": kv_heads} if family == "llama" else {}
    return random_bridge(family, layers=layers, **grouping)


def slow_effects(
    model: TransformerBridge, prompts: Prompts, edges: list[Edge], mode: str, ablation: str
) -> Tensor:
    effects = torch.zeros(len(prompts), len(edges))
    for group in prompts.groups:
        for number, edge in enumerate(edges):
            effects[group.index, number] = slow_effect(
                model,
                group,
                edge,
                lambda logits, group=group: logit_difference(
                    logits, group.correct, group.incorrect
                ),
                mode,
                ablation,
            )
    return effects


def some_edges(model: TransformerBridge, every: int = 6) -> list[Edge]:
    """Edges of all kinds: a few of each receiver kind, from first to last layer."""
    chosen = list(edges_of(model)[::every])
    assert {edge.receiver.kind for edge in chosen} == {"q", "k", "v", "mlp", "logits"}
    assert {edge.sender.kind for edge in chosen} == {"input", "head", "mlp"}
    assert {edge.receiver.layer for edge in chosen} == {*range(model.cfg.n_layers), None}
    return chosen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "kv_heads"), MODELS)
def test_patching_equals_one_hooked_run_per_edge(family: str, kv_heads: int, mode: str) -> None:
    model = model_of(family, kv_heads)
    prompts = random_prompts((6, 4), (2, 1))
    edges = some_edges(model)
    fast = path_patching(model, prompts, edges=edges, mode=mode).effects
    slow = slow_effects(model, prompts, edges, mode, "corrupted")
    assert (slow.abs().max(0).values > 10 * TOLERANCE).float().mean() > 0.9  # edges do something
    torch.testing.assert_close(fast, slow, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("ablation", ["mean", "zero"])
def test_senders_can_be_replaced_by_means_or_zero(ablation: str) -> None:
    model, prompts = model_of("llama", 2, layers=2), random_prompts((5,), (2,))
    edges = some_edges(model, 5)
    fast = path_patching(model, prompts, edges=edges, ablation=ablation).effects
    slow = slow_effects(model, prompts, edges, "direct", ablation)
    torch.testing.assert_close(fast, slow, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("processed", [False, True])
def test_processed_weights_give_the_same_effects(processed: bool) -> None:
    prompts = random_prompts((5,), (3,))
    model = load_model(random_gpt2(layers=2), processed=processed)
    released = path_patching(random_bridge("gpt2", layers=2), prompts)
    torch.testing.assert_close(
        path_patching(model, prompts).effects, released.effects, atol=TOLERANCE, rtol=0
    )


def test_modes_differ_only_where_an_mlp_lies_between() -> None:
    model, prompts = model_of("gpt2", 4), random_prompts((5,), (3,))
    direct = path_patching(model, prompts)
    through = path_patching(model, prompts, mode="through-mlps")
    same = (direct.effects - through.effects).abs().max(0).values < 1e-6
    for edge, equal in zip(direct.edges, same.tolist(), strict=True):
        first = 0 if edge.sender.layer is None else edge.sender.layer
        first += edge.sender.kind == "mlp"
        last = 3 if edge.receiver.layer is None else edge.receiver.layer
        assert equal == (first >= last), edge.name


# ---------------------------------------------------------------------- sets of edges


@pytest.mark.parametrize(("family", "kv_heads"), MODELS)
def test_all_edges_patched_is_the_corrupted_run_and_none_the_clean_run(
    family: str, kv_heads: int
) -> None:
    model, prompts = model_of(family, kv_heads), random_prompts()
    every, none = patched_run(model, prompts, edges_of(model)), patched_run(model, prompts, [])
    for group in prompts.groups:
        for tokens, ours in ((group.corrupted, every), (group.clean, none)):
            with torch.no_grad():
                logits = model(tokens)[:, -1]
            theirs = logit_difference(logits, group.correct, group.incorrect)
            torch.testing.assert_close(ours[group.index], theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("family", "kv_heads"), MODELS)
def test_any_set_of_edges_equals_adding_up_every_receivers_input(
    family: str, kv_heads: int, share: float
) -> None:
    model, prompts = model_of(family, kv_heads, layers=2), random_prompts((5,), (2,))
    edges, (group,) = edges_of(model), prompts.groups
    chosen = torch.rand(len(edges), generator=torch.Generator().manual_seed(1)) < share
    patched = {edge for edge, take in zip(edges, chosen.tolist(), strict=True) if take}
    logits = slow_patched_logits(model, group, patched, layout_of(model))
    theirs = logit_difference(logits, group.correct, group.incorrect)
    ours = patched_run(model, prompts, patched)[group.index]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("ablation", ["corrupted", "mean", "zero"])
def test_a_set_of_one_edge_is_direct_path_patching(ablation: str) -> None:
    model, prompts = model_of("llama", 2), random_prompts((5,), (2,))
    exact = path_patching(model, prompts, ablation=ablation)
    patcher = EdgePatcher(model, prompts, ablation=ablation)
    for number in range(0, len(exact.edges), 4):
        effect = patcher.metric([exact.edges[number]]) - exact.clean
        torch.testing.assert_close(effect, exact.effects[:, number], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("ablation", ["corrupted", "mean", "zero"])
def test_patching_all_edges_of_a_node_ablates_the_node(ablation: str) -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    names = {"corrupted": "resample"}
    influence = node_influence(model, prompts, ablation=names.get(ablation, ablation))
    patcher = EdgePatcher(model, prompts, ablation=ablation)
    for column, node in enumerate(influence.nodes):
        leaving = [edge for edge in edges_of(model) if edge.sender == node]
        effect = patcher.metric(leaving) - influence.clean
        torch.testing.assert_close(effect, influence.effects[:, column], atol=TOLERANCE, rtol=0)


def test_a_patcher_remembers_without_changing_what_it_says() -> None:
    model, prompts = model_of("gpt2", 4, layers=2), random_prompts((5,), (2,))
    edges = edges_of(model)
    patcher = EdgePatcher(model, prompts)
    generator = torch.Generator().manual_seed(0)
    patched: set[Edge] = set()
    for number in torch.randint(len(edges), (25,), generator=generator).tolist():
        patched ^= {edges[number]}
        fresh = patched_run(model, prompts, patched)
        torch.testing.assert_close(patcher.metric(patched), fresh, atol=1e-6, rtol=0)
        torch.testing.assert_close(patcher.metric(patched), fresh, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- linearity


def test_in_a_linear_network_edges_into_the_logits_add_up() -> None:
    model, prompts = linear_bridge(), random_prompts((5,), (4,))
    into_logits = path_patching(model, prompts, receivers=["logits"])
    together = patched_run(model, prompts, into_logits.edges) - into_logits.clean
    assert together.abs().min() > 1e-3
    torch.testing.assert_close(into_logits.effects.sum(1), together, rtol=0.02, atol=1e-3)


def linear_bridge() -> TransformerBridge:
    """A huge constant in two directions of the stream: layer norms divide by a constant, attention
    and MLPs hardly leave their tangent, so all effects are linear to about 1 %.
    """
    network = random_gpt2(layers=2)
    with torch.no_grad():
        network.transformer.wpe.weight[:, 0] += 100.0
        network.transformer.wpe.weight[:, 1] -= 100.0
        network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight * 50)
        network.config.tie_word_embeddings = False
    return load_model(network)


# ---------------------------------------------------------------------- border


def test_only_edges_between_senders_and_receivers_are_measured() -> None:
    model, prompts = random_bridge("llama"), random_prompts((5,), (3,))
    result = path_patching(model, prompts, ["a0.h1", "m1"], ["a1.h0<q>", "m2", "logits"])
    names = [edge.name for edge in result.edges]
    assert names == ["a0.h1->a1.h0<q>", "a0.h1->m2", "m1->m2", "a0.h1->logits", "m1->logits"]
    whole = path_patching(model, prompts)
    columns = [whole.edges.index(edge) for edge in result.edges]
    torch.testing.assert_close(result.effects, whole.effects[:, columns], atol=1e-5, rtol=0)


def test_edges_are_reported_in_the_order_asked_for() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts((5,), (3,))
    names = ["m1->logits", "input->a0.h0<q>", "a0.h1->m1", "m0->logits"]
    result = path_patching(model, prompts, edges=names)
    turned = path_patching(model, prompts, edges=names[::-1])
    assert [edge.name for edge in result.edges] == names
    torch.testing.assert_close(result.effects, turned.effects.flip(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_batch_size_changes_nothing(batch_size: int, mode: str) -> None:
    model, prompts = random_bridge("llama", layers=2), random_prompts(batches=(7, 1))
    reference = path_patching(model, prompts, mode=mode)
    other = path_patching(model, prompts, mode=mode, batch_size=batch_size)
    torch.testing.assert_close(other.effects, reference.effects, atol=TOLERANCE / 10, rtol=0)
    edges = edges_of(model)[::3]
    torch.testing.assert_close(
        patched_run(model, prompts, edges, batch_size=batch_size),
        patched_run(model, prompts, edges),
        atol=TOLERANCE / 10,
        rtol=0,
    )


def test_probability_difference_is_measured_too() -> None:
    model = random_bridge("gpt2")
    prompts = random_prompts(metric="probability_difference")
    result = path_patching(model, prompts, receivers=["logits"])
    assert result.unit == "probability"
    some = result.edges[3]
    effect = patched_run(model, prompts, [some]) - result.clean
    torch.testing.assert_close(result.effects[:, 3], effect, atol=1e-6, rtol=0)


def test_corrupting_nothing_changes_nothing() -> None:
    model, prompts = random_bridge("gpt2"), random_prompts()
    groups = tuple(dataclasses.replace(g, corrupted=g.clean) for g in prompts.groups)
    same = path_patching(model, dataclasses.replace(prompts, groups=groups))
    assert same.effects.abs().max() < 1e-5


def test_patching_leaves_the_model_as_it_was() -> None:
    model, prompts = random_bridge("llama"), random_prompts()
    tokens = prompts.groups[0].clean
    before = model(tokens)
    path_patching(model, prompts, receivers=["a1.h0<q>", "m1"])
    patched_run(model, prompts, ["input->m0"])
    assert torch.equal(model(tokens), before)
    assert not any(point._forward_hooks for point in model.hook_dict.values())


def test_a_checkpoint_continues_where_it_stopped() -> None:
    class Stops(MemoryCheckpoint):
        def put(self, key, tensors) -> None:
            super().put(key, tensors)
            if len(self.parts) == 6:
                raise KeyboardInterrupt

    model, prompts = random_bridge("gpt2"), random_prompts()
    whole = path_patching(model, prompts, mode="through-mlps", batch_size=4)
    kept = Stops()
    with pytest.raises(KeyboardInterrupt):
        path_patching(model, prompts, mode="through-mlps", batch_size=4, checkpoint=kept)
    resumed = MemoryCheckpoint(dict(kept.parts))
    result = path_patching(model, prompts, mode="through-mlps", batch_size=4, checkpoint=resumed)
    assert torch.equal(result.effects, whole.effects)
    assert len(resumed.parts) > 6


def test_effects_survive_saving(tmp_path) -> None:
    prompts = random_prompts(bos=True)
    result = path_patching(random_bridge("llama"), prompts, senders=["m0"], mode="through-mlps")
    result.save(tmp_path / "edges.safetensors")
    loaded = EdgeEffects.load(tmp_path / "edges.safetensors")
    assert torch.equal(loaded.effects, result.effects)
    assert loaded.frame.equals(result.frame)
    assert (loaded.edges, loaded.mode, loaded.bos) == (result.edges, "through-mlps", "<bos>")
    assert "through-mlps, corrupted" in repr(loaded)


def test_a_file_that_holds_something_else_is_refused(tmp_path) -> None:
    path = tmp_path / "new" / "edges.safetensors"
    result = path_patching(random_bridge("gpt2"), random_prompts(), receivers=["m1"])
    result.save(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(InputError, match="does not hold EdgeScores"):
        EdgeScores.load(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="damaged"):
        EdgeEffects.load(path)
    with pytest.raises(InputError, match="no saved result"):
        EdgeEffects.load(tmp_path / "missing.safetensors")


def test_the_frame_says_mean_and_interval() -> None:
    result = path_patching(random_bridge("gpt2"), random_prompts(), receivers=["logits"])
    frame = result.frame.set_index("edge")
    column = [edge.name for edge in result.edges].index("m2->logits")
    row = frame.loc["m2->logits"]
    assert row["effect"] == pytest.approx(float(result.effects[:, column].mean()), abs=1e-6)
    assert row["effect_low"] < row["effect"] < row["effect_high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "indirect"}, "direct, through-mlps"),
        ({"ablation": "resample"}, "corrupted, mean, zero"),
        ({"batch_size": 0}, "at least 1"),
        ({"senders": ["a9.h0"]}, "no sender a9.h0"),
        ({"receivers": ["a1.g0<k>"]}, "no receiver a1.g0<k>"),
        ({"senders": ["m2"], "receivers": ["m1"]}, "no edge"),
        ({"edges": ["m0->m1", "m0->m1"]}, "twice"),
        ({"edges": ["m0->m1"], "senders": ["m0"]}, "either"),
        ({"edges": ["m0->m7"]}, "m7"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        path_patching(random_bridge("gpt2"), random_prompts(), **arguments)


def test_progress_counts_edges_times_prompts() -> None:
    seen: list[tuple[int, int]] = []
    prompts = random_prompts()
    result = path_patching(
        random_bridge("gpt2"),
        prompts,
        receivers=["m1", "m2", "logits"],
        progress=lambda stage, done, total: seen.append((done, total)),
    )
    assert seen[-1] == (result.effects.numel(), result.effects.numel())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
