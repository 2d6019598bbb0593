"""The roles of attention heads, as scores between 0 and 1 with a baseline.

Every role is a number for each head and each prompt (or probe), averaged. The baseline is what a
head gets that attends to everything up to its own position alike; a second part of the role, where
there is one, counts as perfect in the baseline. All are unchanged by rotating the residual stream
and by permuting or rescaling heads.

On random sequences said twice (``circuitkd.circuits._role_probes``):

- *previous token*: attention to the token before (Elhage et al. 2021; Wang et al. 2022).
- *duplicate token*: attention from a repeated token to its earlier occurrence (Wang et al. 2022).
- *induction*: attention from a repeated token to what followed it before; the prefix-matching score
  of Olsson et al. 2022.

On tasks with labels ``N1``, ``N2``, ... (sequences):

- *sequence member*: attention from each member to the one before it, N(k) to N(k-1); the
  similar-member and number-detection heads of Lan et al. 2023.
- *last member mover*: attention from END to the last member (Lan et al. 2023).
- *successor*: share of the steps to the next member that the head's OV circuit makes (Gould et al.
  2023; ``circuitkd.circuits._role_successor``).

On tasks with labels ``IO`` (and ``S1``, ``S2``):

- *name mover*: attention from END to IO, counted where the head's values there raise the answer
  most of all names (Wang et al. 2022; ``circuitkd.circuits._role_movers``).
- *negative name mover*: the same where they lower it most (Wang et al. 2022; copy suppression in
  McDougall et al. 2023).
- *S-inhibition*: attention from END to S2, times the share of the name movers' odds of looking at
  IO rather than S that they owe to the head's write at END (Wang et al. 2022).
"""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._head_patterns import cell_attention, layer_patterns, uniform_attention
from circuitkd.circuits._role_movers import group_copying, group_inhibition
from circuitkd.circuits._role_probes import Scores, probe_scores, repeated_sequences
from circuitkd.circuits._role_result import (
    INHIBITION,
    LAST_MEMBER,
    MEMBER,
    MOVER,
    NEGATIVE_MOVER,
    ON_PROBES,
    ROLES,
    SUCCESSOR,
    HeadRoles,
)
from circuitkd.circuits._role_successor import successor_scores
from circuitkd.circuits.influence import Progress
from circuitkd.errors import InputError
from circuitkd.models import component_nodes_of, family_of_model, model_label
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

__all__ = ["ON_PROBES", "ROLES", "HeadRoles", "head_roles"]

_MEMBER_LABEL = re.compile(r"N[0-9]+")


@torch.no_grad()
def head_roles(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    movers: Iterable[Node | str] | None = None,
    probes: int = 24,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> HeadRoles:
    """Score every head for every role that the prompts have the labels for.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        movers: the name movers whose attention S-inhibition is about, each counted alike; by
            default those that hold that role, weighted by their scores.
        probes: number of random sequences for the roles that are not about the task.
        seed: of the random sequences.
        batch_size: prompts that go through the model at once.
        progress: called as ``progress(stage, done, total)``, done and total in roles.

    Returns:
        ``HeadRoles``; the module says what each role is. Roles that the task has no labels for
        are listed in ``skipped`` with the reason.

    Raises:
        InputError: no prompts, too few probes, or a mover that the model does not have.
        ArchitectureError: the engine does not understand the network.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> roles = head_roles(student, ckd.load_task("ioi").sample(student, n=8))
    >>> sorted(roles.skipped)
    ['last member mover', 'sequence member', 'successor']
    """
    if len(prompts) == 0:
        raise InputError("There are no prompts to look at.")
    if probes < 2:
        raise InputError(f"An interval needs at least 2 probes, not {probes}.")
    heads = tuple(node for node in component_nodes_of(model) if node.kind == "head")
    chosen = _chosen(movers, heads, model)
    found: dict[str, Scores] = {}
    skipped: dict[str, str] = {}

    def report() -> None:
        if progress is not None:
            progress(f"Roles in {model_label(model)}", len(found) + len(skipped), len(ROLES))

    def result() -> HeadRoles:
        return HeadRoles(
            model=model_label(model),
            task=prompts.task,
            nodes=heads,
            scores={role: scores for role, (scores, _) in found.items()},
            baselines={role: baseline for role, (_, baseline) in found.items()},
            skipped=skipped,
        )

    family = family_of_model(model)
    if not family.adds_up:
        why = f"roles are defined for decoders whose stream is a sum, and {family.name} is none"
        skipped |= dict.fromkeys(ROLES, why)
        return result()
    sequences = repeated_sequences(model, prompts, probes, seed)
    if sequences:
        found |= probe_scores(model, sequences, batch_size)
    else:
        few = "the model knows too few tokens, or reads too few at once, for probes"
        skipped |= dict.fromkeys(ON_PROBES, few)
    report()
    members = _members(prompts)
    _add_sequence_roles(model, prompts, members, found, skipped, batch_size)
    report()
    _add_mover_roles(model, prompts, found, skipped, batch_size)
    report()
    if chosen is None and MOVER in found:
        chosen = result().holders(MOVER)
    _add_inhibition(model, prompts, chosen, found, skipped, batch_size)
    report()
    return result()


def _add_sequence_roles(
    model: TransformerBridge,
    prompts: Prompts,
    members: tuple[str, ...],
    found: dict[str, Scores],
    skipped: dict[str, str],
    batch_size: int | None,
) -> None:
    if len(members) < 2:
        reason = "the prompts have no labels N1, N2, ..."
        skipped |= dict.fromkeys((MEMBER, LAST_MEMBER, SUCCESSOR), reason)
        return
    steps = [(later, earlier) for earlier, later in pairwise(members)]
    cells = {MEMBER: steps, LAST_MEMBER: [("END", members[-1])]}
    found |= _attention_scores(model, prompts, cells, batch_size)
    found[SUCCESSOR] = successor_scores(model, prompts, members)


def _add_mover_roles(
    model: TransformerBridge,
    prompts: Prompts,
    found: dict[str, Scores],
    skipped: dict[str, str],
    batch_size: int | None,
) -> None:
    if not _have(prompts, ("IO",)):
        skipped |= dict.fromkeys((MOVER, NEGATIVE_MOVER), "the prompts have no label IO")
        return
    cells = {MOVER: [("END", "IO")]}
    attention, baseline = _attention_scores(model, prompts, cells, batch_size)[MOVER]
    scores = {MOVER: torch.zeros_like(attention), NEGATIVE_MOVER: torch.zeros_like(attention)}
    for group in prompts.groups:
        copying = group_copying(model, prompts, group, batch_size)
        scores[MOVER][group.index] = attention[group.index] * copying.up
        scores[NEGATIVE_MOVER][group.index] = attention[group.index] * copying.down
    found |= {role: (score, baseline) for role, score in scores.items()}


def _add_inhibition(
    model: TransformerBridge,
    prompts: Prompts,
    movers: Mapping[Node, float] | None,
    found: dict[str, Scores],
    skipped: dict[str, str],
    batch_size: int | None,
) -> None:
    if not _have(prompts, ("IO", "S1", "S2")):
        skipped[INHIBITION] = "the prompts have no labels IO, S1 and S2"
        return
    if not movers:
        skipped[INHIBITION] = "no head is a name mover, whose attention it could change"
        return
    cells = {INHIBITION: [("END", "S2")]}
    scores, baseline = _attention_scores(model, prompts, cells, batch_size)[INHIBITION]
    for group in prompts.groups:
        scores[group.index] *= group_inhibition(model, group, movers, batch_size)
    found[INHIBITION] = scores, baseline


def _attention_scores(
    model: TransformerBridge,
    prompts: Prompts,
    cells: Mapping[str, list[tuple[str, str]]],
    batch_size: int | None,
) -> dict[str, Scores]:
    """Mean attention over each role's cells, given as labels (query, key)."""
    n_heads = model.cfg.n_layers * model.cfg.n_heads
    scores = {role: torch.zeros(len(prompts), n_heads) for role in cells}
    even = {role: torch.zeros(len(prompts)) for role in cells}
    for group in prompts.groups:
        places = {role: _places(group, pairs) for role, pairs in cells.items()}
        for layer, pattern in enumerate(layer_patterns(model, group.clean, batch_size)):
            own = slice(layer * model.cfg.n_heads, (layer + 1) * model.cfg.n_heads)
            for role, where in places.items():
                scores[role][group.index, own] = cell_attention(pattern, where)
        for role, where in places.items():
            even[role][group.index] = uniform_attention(where)
    return {role: (scores[role], float(even[role].double().mean())) for role in cells}


def _places(group: PromptGroup, pairs: list[tuple[str, str]]) -> Int[Tensor, "batch cell 2"]:
    at = group.positions
    return torch.stack([torch.stack([at[query], at[key]], 1) for query, key in pairs], 1)


def _members(prompts: Prompts) -> tuple[str, ...]:
    """Labels ``N1``, ``N2``, ... that all prompts have, in this order."""
    labels = (label for label in prompts.groups[0].positions if _MEMBER_LABEL.fullmatch(label))
    shared = [label for label in labels if _have(prompts, (label,))]
    return tuple(sorted(shared, key=lambda label: int(label[1:])))


def _have(prompts: Prompts, labels: Iterable[str]) -> bool:
    needed = {*labels, "END"}
    return all(needed <= set(group.positions) for group in prompts.groups)


def _chosen(
    movers: Iterable[Node | str] | None, heads: tuple[Node, ...], model: TransformerBridge
) -> dict[Node, float] | None:
    if movers is None:
        return None
    nodes = [node if isinstance(node, Node) else Node.parse(node) for node in movers]
    if unknown := [node.name for node in nodes if node not in heads]:
        raise InputError(f"{model_label(model)} has no head {', '.join(unknown)}.")
    return dict.fromkeys(nodes, 1.0)
