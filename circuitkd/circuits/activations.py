"""What each head and MLP does on a set of prompts: the material of similarity.

Outputs are centred by their mean-ablation value (the mean over other corrupted prompts of the same
shape, position by position): what every prompt shares counts for nothing, here as in influence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.engine import Observed, Replay, rows_per_batch
from circuitkd.circuits.influence import Progress, observe_in_slices
from circuitkd.errors import InputError
from circuitkd.models import component_nodes_of, model_label
from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts


@dataclass(frozen=True)
class Components:
    """The outputs of one model's heads and MLPs, at chosen positions of every prompt.

    A row is one position of one prompt; ``row_prompt`` is the prompt's place in sampling order.
    ``features``, one tensor [row, feature] a node, are centred outputs in a basis in which inner
    products equal those of the contributions to the residual stream: d_head wide for heads,
    d_model for MLPs. They do not depend on how the residual stream or a head's inside is rotated.
    ``raw_mlp``, one tensor a layer, are the MLPs' outputs as they are.
    ``patterns``, one tensor [batch, head, query, key] a group, are attention patterns at the same
    positions, all layers' heads in node order; ``group_prompts`` are the groups' prompts.
    """

    nodes: tuple[Node, ...]
    features: tuple[Float[Tensor, "row _"], ...]
    raw_mlp: tuple[Float[Tensor, "row d_model"], ...]
    row_prompt: Int[Tensor, "row"]
    patterns: tuple[Float[Tensor, "_ head _ _"], ...]
    group_prompts: tuple[Int[Tensor, "_"], ...]


@torch.no_grad()
def record_components(
    model: TransformerBridge,
    prompts: Prompts,
    positions: Sequence[Int[Tensor, "_ _"]],
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Components:
    """Run the prompts once and keep every component's output and pattern at ``positions``.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` or ``task.sample_pair`` with this model.
        positions: for each group, token positions [batch, compared], the same number for every
            prompt of the group. To compare two models give each its own positions of the same
            places in the text.
        batch_size: prompts that go through the model at once.
        progress: called as ``progress(stage, done, total)``, done and total in groups.

    Returns:
        ``Components`` on the CPU in float32; rows are ordered by group, prompt, position.
    """
    if len(positions) != len(prompts.groups):
        raise InputError(
            f"{len(prompts.groups)} groups need as many sets of positions, not {len(positions)}."
        )
    parts = []
    for number, (group, places) in enumerate(zip(prompts.groups, positions, strict=True)):
        parts.append(_record_group(model, group, places, batch_size))
        if progress is not None:
            progress(f"Recording {model_label(model)}", number + 1, len(prompts.groups))
    return Components(
        nodes=component_nodes_of(model),
        features=tuple(torch.cat(node) for node in zip(*(p.features for p in parts), strict=True)),
        raw_mlp=tuple(torch.cat(layer) for layer in zip(*(p.raw_mlp for p in parts), strict=True)),
        row_prompt=torch.cat(
            [
                group.index.repeat_interleave(places.shape[1])
                for group, places in zip(prompts.groups, positions, strict=True)
            ]
        ),
        patterns=tuple(torch.cat(part.patterns, dim=1) for part in parts),
        group_prompts=tuple(group.index for group in prompts.groups),
    )


@dataclass(frozen=True)
class _GroupRecord:
    features: list[Tensor]
    raw_mlp: list[Tensor]
    patterns: list[Tensor]


def _record_group(
    model: TransformerBridge,
    group: PromptGroup,
    places: Int[Tensor, "batch compared"],
    batch_size: int | None,
) -> _GroupRecord:
    replay = Replay(model, group.clean, group.answer)
    rows = rows_per_batch(model, group.clean.shape[1], batch_size)
    clean, means = replay.embed(group.clean), replay.embed(group.means)
    record = _GroupRecord([], [], [])
    for layer in range(replay.n_layers):
        seen = observe_in_slices(replay, layer, clean, rows, pattern=True)
        mean = observe_in_slices(replay, layer, means, rows)
        clean, means = seen.post, mean.post
        record.features.extend(_head_features(replay.W_O(layer), seen, mean, places))
        mlp = _at(seen.mlp, places)
        centre = _at(mean.mlp.float().mean(0).expand(len(places), -1, -1), places)
        record.features.append((mlp - centre).flatten(0, 1))
        record.raw_mlp.append(mlp.flatten(0, 1))
        record.patterns.append(_pattern_at(seen.pattern, places))
    return record


def _head_features(
    W_O: Float[Tensor, "head d_head d_model"],
    seen: Observed,
    mean: Observed,
    places: Int[Tensor, "batch compared"],
) -> list[Float[Tensor, "row d_head"]]:
    centred = seen.z.float() - mean.z.float().mean(0)
    centred = rearrange(_at(centred.flatten(2), places), "b p (h d) -> h (b p) d", h=len(W_O))
    return list(einsum(centred, gram_root(W_O), "head row d, head d out -> head row out"))


def gram_root(
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "head d_head d_head"]:
    """R with R R^T = W_O W_O^T: (x R).(y R) is the inner product of the writes x W_O and y W_O.

    >>> W_O = torch.randn(2, 3, 7)
    >>> root = gram_root(W_O)
    >>> torch.allclose(root @ root.mT, W_O @ W_O.mT, atol=1e-4)
    True
    """
    W_O = W_O.double().cpu()
    values, vectors = torch.linalg.eigh(W_O @ W_O.mT)
    return (vectors * values.clamp_min(0).sqrt()[:, None, :]).float()


def _at(
    activation: Float[Tensor, "batch pos d"], places: Int[Tensor, "batch compared"]
) -> Float[Tensor, "batch compared d"]:
    """The activation at each prompt's positions, float32 on the CPU."""
    return activation.float().cpu().take_along_dim(places[..., None], dim=1)


def _pattern_at(
    pattern: Float[Tensor, "batch head query key"] | None, places: Int[Tensor, "batch compared"]
) -> Float[Tensor, "batch head compared compared"]:
    if pattern is None:
        raise InputError("No attention pattern was observed.")
    pattern = pattern.float().cpu()
    rows = pattern.take_along_dim(places[:, None, :, None], dim=2)
    return rows.take_along_dim(places[:, None, None, :], dim=3)
