"""Head roles: what each score is, on attention set by hand, and against hooks written out."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from circuits.slow_patching import all_values, output_of, run
from prompt_samples import KINDS, SHIPPED
from random_models import random_bridge, random_gpt2, random_llama, random_prompts
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd import load_model
from circuitkd.circuits import _role_probes, _role_successor, roles
from circuitkd.circuits._head_patterns import cell_attention
from circuitkd.circuits._role_movers import group_copying, group_inhibition
from circuitkd.circuits._role_probes import CELLS, probe_scores, repeated_sequences
from circuitkd.circuits.attention import ROLES, HeadRoles, head_roles
from circuitkd.errors import InputError
from circuitkd.models import component_nodes_of
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts, tokenised

IOI = [{"IO": 1, "S1": 3, "S2": 5, "END": 6}, {"S1": 0, "IO": 1, "S2": 3, "END": 4}]
NUMBERS = [{"N1": 0, "N2": 2, "N3": 5, "END": 6}, {"N1": 1, "N2": 2, "N3": 3, "END": 4}]
SEQUENCE_ROLES = ["sequence member", "last member mover", "successor"]
NAME_ROLES = ["name mover", "negative name mover", "S-inhibition"]


def with_labels(places: list[dict[str, int]], *, bos: bool = False) -> Prompts:
    prompts = random_prompts(bos=bos)
    groups = [
        replace(group, positions={k: torch.full((len(group),), v) for k, v in own.items()})
        for group, own in zip(prompts.groups, places, strict=True)
    ]
    return replace(prompts, groups=tuple(groups))


def without_queries(family: str = "gpt2") -> TransformerBridge:
    """Every head looks at everything up to its own position alike."""
    network: Any = random_gpt2() if family == "gpt2" else random_llama()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "c_attn" in name:
                parameter[..., :32] = 0
            if "q_proj" in name:
                parameter.zero_()
    return load_model(network)


# What the scores are


def test_a_uniform_head_gets_the_baseline_of_every_role_of_attention() -> None:
    for family in ("gpt2", "llama"):
        found = head_roles(without_queries(family), with_labels(NUMBERS))
        for role in ("previous token", "duplicate token", "induction", *SEQUENCE_ROLES[:2]):
            scores = found.scores[role].double().mean(0)
            expected = torch.full_like(scores, found.baselines[role])
            torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)
            assert found.holders(role) == {}


def test_baselines_are_one_over_the_tokens_in_view() -> None:
    found = head_roles(without_queries(), with_labels(NUMBERS))
    long, short = (1 / 3 + 1 / 6) / 2, (1 / 3 + 1 / 4) / 2
    assert found.baselines["sequence member"] == pytest.approx((5 * long + 3 * short) / 8)
    assert found.baselines["last member mover"] == pytest.approx((5 / 7 + 3 / 5) / 8)
    (begin, half), queries = (0, 4), range(4, 8)
    cells = CELLS["induction"](begin, half)
    assert cells.tolist() == [[q, q - 3] for q in queries]


def test_cells_of_roles_on_a_probe_of_three_tokens_behind_a_bos() -> None:
    """BOS a b c a b c: positions 1 2 3 and 4 5 6."""
    assert CELLS["previous token"](1, 3).tolist() == [[2, 1], [3, 2], [4, 3], [5, 4], [6, 5]]
    assert CELLS["duplicate token"](1, 3).tolist() == [[4, 1], [5, 2], [6, 3]]
    assert CELLS["induction"](1, 3).tolist() == [[4, 2], [5, 3], [6, 4]]


@pytest.mark.parametrize(
    ("back", "role"), [(1, "previous token"), (0, "duplicate token"), (-1, "induction")]
)
def test_a_head_set_by_hand_has_its_role_alone(monkeypatch, back: int, role: str) -> None:
    """Head 0 of a layer of two looks ``half + back`` back from repeated tokens; head 1 anywhere."""

    def patterns(model, tokens: Tensor, batch_size: int | None):
        n_pos = tokens.shape[1]
        pattern = torch.rand(len(tokens), 2, n_pos, n_pos).tril()
        pattern[:, 0] = torch.zeros(n_pos, n_pos)
        for q in range(1, n_pos):
            earlier = (tokens[0, :q] == tokens[0, q]).nonzero()
            if role == "previous token":
                pattern[:, 0, q, q - 1] = 1
            elif len(earlier):
                pattern[:, 0, q, int(earlier[0]) - back] = 1
        yield pattern / pattern.sum(-1, keepdim=True).clamp_min(1)

    monkeypatch.setattr(_role_probes, "layer_patterns", patterns)
    model, prompts = random_bridge("gpt2"), random_prompts(bos=True)
    found = probe_scores(model, repeated_sequences(model, prompts, 6, 0))
    for name, (scores, baseline) in found.items():
        if name == role:
            torch.testing.assert_close(scores[:, 0], torch.ones(6))
        else:
            assert scores[:, 0].max() < 0.1
        assert abs(float(scores[:, 1].mean()) - baseline) < 0.1


def test_probes_repeat_their_first_half_and_vary_in_length() -> None:
    model = random_bridge("gpt2")
    sequences = repeated_sequences(model, random_prompts(bos=True), 9, 0)
    assert [half for half, _ in sequences] == [12, 16, 20]
    for half, tokens in sequences:
        assert tokens.shape == (3, 1 + 2 * half)
        assert (tokens[:, 0] == 0).all()
        assert torch.equal(tokens[:, 1 : 1 + half], tokens[:, 1 + half :])
        assert all(len(set(row)) == half for row in tokens[:, 1 : 1 + half].tolist())
        assert not (tokens[:, 1:] == 0).any()  # BOS is no ordinary token
    again = repeated_sequences(model, random_prompts(bos=True), 9, 0)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(sequences, again, strict=True))


def test_too_few_tokens_for_probes_are_said() -> None:
    model = load_model(random_gpt2(vocabulary=2))
    prompts = random_prompts()
    groups = [
        replace(g, **{k: getattr(g, k) % 2 for k in ("clean", "corrupted", "means")})
        for g in prompts.groups
    ]
    found = head_roles(model, replace(prompts, groups=tuple(groups)))
    assert "too few tokens" in found.skipped["induction"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_probe_scores_are_loops_over_hooked_patterns(family: str) -> None:
    model, prompts = random_bridge(family), random_prompts(bos=True)
    sequences = repeated_sequences(model, prompts, 4, 3)
    found = probe_scores(model, sequences)
    row = 0
    for half, tokens in sequences:
        for sequence in tokens:
            cache = all_values(model, sequence[None])
            for head in range(12):
                pattern = cache[f"blocks.{head // 4}.attn.hook_pattern"][0, head % 4]
                second = range(1 + half, 1 + 2 * half)
                slow = {
                    "previous token": [pattern[q, q - 1] for q in range(2, 1 + 2 * half)],
                    "duplicate token": [pattern[q, q - half] for q in second],
                    "induction": [pattern[q, q - half + 1] for q in second],
                }
                for role, cells in slow.items():
                    mean = torch.stack(cells).mean()
                    torch.testing.assert_close(found[role][0][row, head], mean, atol=1e-5, rtol=0)
            row += 1


# Sequences


def test_sequence_roles_are_attention_between_labels() -> None:
    model, prompts = random_bridge("llama"), with_labels(NUMBERS)
    found = head_roles(model, prompts)
    for group in prompts.groups:
        cache = all_values(model, group.clean)
        pattern = torch.cat([cache[f"blocks.{i}.attn.hook_pattern"] for i in range(3)], 1)
        n1, n2, n3, end = (int(group.positions[k][0]) for k in ("N1", "N2", "N3", "END"))
        member = (pattern[:, :, n2, n1] + pattern[:, :, n3, n2]) / 2
        last = pattern[:, :, end, n3]
        for role, slow in (("sequence member", member), ("last member mover", last)):
            torch.testing.assert_close(found.scores[role][group.index], slow, atol=1e-5, rtol=0)
    assert sorted(found.skipped) == sorted(NAME_ROLES)
    assert "no label IO" in found.skipped["name mover"]


def test_a_head_whose_ov_circuit_counts_is_a_successor(monkeypatch) -> None:
    """Head 0 raises the next member most, head 1 copies, head 2 does nothing."""
    monkeypatch.setattr(_role_successor, "ov_circuit", counting)
    prompts = counting_prompts()
    scores, baseline = _role_successor.successor_scores(
        random_bridge("gpt2", layers=1), prompts, ("N1", "N2", "N3")
    )
    assert scores.mean(0).tolist() == [1, 0, 0]
    assert baseline == pytest.approx(1 / 9)


def counting(model, layer: int, head: None, words: Tensor, *, after_mlp0: bool) -> Tensor:
    successor = (words[None] == words[:, None] + 1).float()
    return torch.stack([successor, torch.eye(len(words)), torch.zeros(len(words), len(words))])


def counting_prompts() -> Prompts:
    """Runs of four from 5 to 13; the answer is the fourth."""
    prompts = with_labels(NUMBERS)
    groups = []
    for group in prompts.groups:
        starts, clean = torch.arange(len(group)) + 6 - group.template, group.clean.clone()
        for step, label in enumerate(("N1", "N2", "N3")):
            clean[torch.arange(len(group)), group.positions[label]] = starts + step
        groups.append(replace(group, clean=clean, correct=starts + 3))
    return replace(prompts, groups=tuple(groups))


def test_successor_scores_are_loops_over_members() -> None:
    model, prompts = random_bridge("llama"), counting_prompts()
    scores, _ = _role_successor.successor_scores(model, prompts, ("N1", "N2", "N3"))
    words = list(range(5, 14))
    W_U, norm = model.W_U, model.ln_final.original_component.weight
    for group in prompts.groups:
        for b, place in enumerate(group.index.tolist()):
            chain = [int(group.clean[b, group.positions[k][b]]) for k in ("N1", "N2", "N3")]
            chain.append(int(group.correct[b]))
            for layer in range(3):
                block = model.blocks[layer]
                for head in range(4):
                    made = 0
                    for one, following in pairwise(chain):
                        x = model.W_E[one][None, None]
                        if layer:
                            x = x + model.blocks[0].mlp(model.blocks[0].ln2(x))
                        value = block.ln1(x)[0, 0] @ block.attn.W_V[head // 2]
                        logits = (value @ block.attn.W_O[head] * norm) @ W_U[:, words]
                        made += int(words[int(logits.argmax())] == following)
                    assert scores[place, 4 * layer + head] == pytest.approx(made / 3)


# Names


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_copying_is_a_loop_over_names(family: str) -> None:
    model, prompts = random_bridge(family), with_labels(IOI)
    names = sorted({int(t) for g in prompts.groups for t in (*g.correct, *g.incorrect)})
    norm = model.ln_final.original_component.weight
    ups = 0
    for group in prompts.groups:
        found = group_copying(model, prompts, group)
        clean, means = (all_values(model, tokens) for tokens in (group.clean, group.means))
        place = int(group.positions["IO"][0])
        for layer in range(3):
            point = f"blocks.{layer}.attn.v.hook_out"
            for head in range(4):
                kv = head if family == "gpt2" else head // 2
                v, usual = (
                    c[point].unflatten(2, (-1, 8)) if c[point].ndim == 3 else c[point]
                    for c in (clean, means)
                )
                change = v[:, place, kv] - usual[:, place, kv].mean(0)
                write = change @ model.blocks[layer].attn.W_O[head]
                if family == "gpt2":
                    write = write - write.mean(-1, keepdim=True)
                logits = (write * norm) @ model.W_U[:, names]
                for b, answer in enumerate(group.correct.tolist()):
                    own = names.index(answer)
                    assert found.up[b, 4 * layer + head] == (logits[b].argmax() == own)
                    assert found.down[b, 4 * layer + head] == (logits[b].argmin() == own)
                    ups += int(logits[b].argmax() == own)
    assert ups  # some head copies some name: not everything compared was False


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_name_movers_are_attention_where_they_copy(family: str) -> None:
    model, prompts = random_bridge(family), with_labels(IOI)
    found = head_roles(model, prompts)
    for group in prompts.groups:
        copying = group_copying(model, prompts, group)
        cache = all_values(model, group.clean)
        pattern = torch.cat([cache[f"blocks.{i}.attn.hook_pattern"] for i in range(3)], 1)
        looks = pattern[:, :, -1, int(group.positions["IO"][0])]
        for role, how in (("name mover", copying.up), ("negative name mover", copying.down)):
            torch.testing.assert_close(
                found.scores[role][group.index], looks * how, atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_inhibition_is_path_patching_into_the_movers_queries(family: str) -> None:
    """Each sender's write at END is replaced by hooks in the query of one mover at a time."""
    model, prompts = random_bridge(family), with_labels(IOI)
    movers = {Node.attention_head(1, 3): 0.25, Node.attention_head(2, 0): 0.75}
    for group in prompts.groups:
        found = group_inhibition(model, group, movers)
        clean, means = (all_values(model, tokens) for tokens in (group.clean, group.means))
        for number, sender in enumerate(n for n in component_nodes_of(model) if n.kind == "head"):
            usual = output_of(model, means, sender).mean(0)
            change = usual - output_of(model, clean, sender)
            change[:, :-1] = 0
            slow = torch.zeros(len(group))
            for mover, weight in movers.items():
                if (sender.layer or 0) < (mover.layer or 0):
                    slow += weight * lost_odds(model, group, mover, change)
            torch.testing.assert_close(found[:, number], slow, atol=1e-4, rtol=0)
        assert found.max() > 0.05


def lost_odds(model: TransformerBridge, group, mover: Node, change: Tensor) -> Tensor:
    point = f"blocks.{mover.layer}.attn.hook_pattern"
    seen: dict[str, Tensor] = {}

    def odds(hooks: dict) -> Tensor:
        run(model, group.clean, {**hooks, point: lambda p, hook: seen.update(p=p.clone()) or p})
        row = seen["p"][:, mover.head, -1]
        io, s1, s2 = (int(group.positions[k][0]) for k in ("IO", "S1", "S2"))
        return row[:, io] / (row[:, s1] + row[:, s2])

    query = f"blocks.{mover.layer}.attn.q.hook_out"
    kept: dict[str, Tensor] = {}
    run(
        model,
        group.clean,
        {
            f"blocks.{mover.layer}.ln1.hook_in": lambda s, hook: s + change,
            query: lambda q, hook: kept.update(q=q.clone()) or q,
        },
    )
    patched = odds({query: lambda q, hook: kept["q"]})
    return (1 - patched / odds({})).clamp_min(0)


def test_inhibition_asks_for_attention_to_the_second_subject_and_for_movers() -> None:
    model, prompts = random_bridge("gpt2"), with_labels(IOI)
    assert "no head is a name mover" in head_roles(model, prompts).skipped["S-inhibition"]
    mover = Node.attention_head(2, 0)
    found = head_roles(model, prompts, movers=["a2.h0"])
    for group in prompts.groups:
        cache = all_values(model, group.clean)
        pattern = torch.cat([cache[f"blocks.{i}.attn.hook_pattern"] for i in range(3)], 1)
        looks = pattern[:, :, -1, int(group.positions["S2"][0])]
        effect = group_inhibition(model, group, {mover: 1.0})
        torch.testing.assert_close(
            found.scores["S-inhibition"][group.index], looks * effect, atol=1e-5, rtol=0
        )
    assert found.scores["S-inhibition"][:, 8:].abs().max() == 0  # not before the mover


# Results


def test_scores_lie_between_0_and_1_with_their_intervals() -> None:
    found = head_roles(random_bridge("llama"), with_labels(IOI), movers=["a2.h1"])
    frame = found.frame
    assert len(frame) == 6 * 12
    assert ((frame["score"] >= 0) & (frame["score"] <= 1)).all()
    assert ((frame["low"] <= frame["score"]) & (frame["score"] <= frame["high"])).all()
    assert set(frame[frame["role"] == "induction"]["samples"]) == {"probes"}
    assert set(frame[frame["role"] == "name mover"]["samples"]) == {"prompts"}


def test_holders_stand_out_from_the_uniform_head_by_their_whole_interval() -> None:
    scores = torch.tensor([[0.9, 1.0, 0.2, 0.26], [0.8, 0.0, 0.2, 0.26]]).repeat(4, 1)
    nodes = tuple(Node.attention_head(0, head) for head in range(4))
    found = HeadRoles("m", "t", nodes, {"induction": scores}, {"induction": 0.2}, {})
    assert found.holders("induction") == {nodes[0]: pytest.approx(0.85)}  # head 1 may be chance
    assert list(found.holders("induction", least=0.05)) == [nodes[0], nodes[3]]
    assert list(found.holders("induction", least=0.8)) == [nodes[0]]
    with pytest.raises(InputError, match="no scores for 'name mover'"):
        found.holders("name mover")


def test_the_shipped_tasks_have_their_roles() -> None:
    kinds = [KINDS["byte_level"], KINDS["llama_like"]]
    networks = [random_gpt2(vocabulary=len(kinds[0])), random_llama(vocabulary=len(kinds[1]))]
    for task, missing in (("ioi", SEQUENCE_ROLES), ("months", NAME_ROLES)):
        samples = tokenised(SHIPPED[task], kinds, 4)
        for network, tokenizer, prompts in zip(networks, kinds, samples, strict=True):
            found = head_roles(load_model(network, tokenizer=tokenizer), prompts, probes=3)
            assert set(found.skipped) - {"S-inhibition"} == set(missing) - {"S-inhibition"}


def test_batch_size_changes_nothing() -> None:
    model, prompts = random_bridge("llama"), with_labels(IOI)
    whole, single = (
        head_roles(model, prompts, movers=["a2.h1"], probes=3, batch_size=size)
        for size in (None, 3)
    )
    for role, scores in whole.scores.items():
        torch.testing.assert_close(scores, single.scores[role], atol=1e-5, rtol=0)


def test_roles_are_saved_and_loaded(tmp_path: Path) -> None:
    found = head_roles(random_bridge("gpt2"), with_labels(NUMBERS))
    found.save(tmp_path / "roles.safetensors")
    again = HeadRoles.load(tmp_path / "roles.safetensors")
    assert repr(again) == repr(found)
    assert again.nodes == found.nodes
    assert all(torch.equal(again.scores[role], found.scores[role]) for role in found.scores)
    assert all(role in repr(found) for role in ROLES)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    model, prompts = random_bridge("gpt2"), with_labels(IOI)
    with pytest.raises(InputError, match=r"no head a7\.h0"):
        head_roles(model, prompts, movers=["a7.h0"])
    with pytest.raises(InputError, match="no prompts"):
        head_roles(model, replace(prompts, groups=()))
    with pytest.raises(InputError, match="at least 2 probes"):
        head_roles(model, prompts, probes=1)
    with pytest.raises(InputError, match="no saved result"):
        HeadRoles.load(tmp_path / "nothing")


def test_cells_may_differ_from_prompt_to_prompt() -> None:
    pattern = torch.rand(2, 3, 4, 4)
    cells = torch.tensor([[[3, 1], [2, 0]], [[1, 1], [3, 2]]])
    slow = torch.stack(
        [
            (pattern[0, :, 3, 1] + pattern[0, :, 2, 0]) / 2,
            (pattern[1, :, 1, 1] + pattern[1, :, 3, 2]) / 2,
        ]
    )
    torch.testing.assert_close(cell_attention(pattern, cells), slow)
    assert roles.ROLES == ROLES
