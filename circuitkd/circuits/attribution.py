"""Gradient estimates of what nodes and edges do, all of them for a few passes.

- ``atp``, attribution patching (Nanda 2023): a node's change times the gradient of the metric at
  its output.
- ``eap`` (Syed et al. 2023): for an edge, the sender's change times the gradient at the receiver's
  input, before its layer norm, with the query, key and value input of a head apart.
- ``eap-ig`` (Hanna et al. 2024, "inputs"): the same, with the gradient averaged over runs whose
  embedding lies between the replaced and the clean one, at the midpoints (k + 1/2) / steps. The
  scores of the edges that leave ``input`` then sum to the total effect, up to the rule's error.

A change is replaced minus clean output. What replaces it is the output on the paired corrupted
prompt (``corrupted``), the mean over other corrupted prompts (``mean``), or zero (``zero``); the
embedding is replaced by its own. With ``zero``, ``eap-ig`` converges slowly: layer norms undo the
scale of the embedding, so nearly all change happens close to zero.

Sign: a score estimates ``effect`` = metric(patched) - metric(clean), as ``path_patching`` measures
it in mode ``direct``. Negative means that the node or edge helps.
"""

from collections.abc import Callable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._edge_results import EdgeEffects, EdgeScores, NodeScores
from circuitkd.circuits._gradients import edge_products, metric_gradients
from circuitkd.circuits._senders import (
    Ablation,
    Replacements,
    Written,
    check_arguments,
    prompt_slices,
    sender_changes,
    trace,
)
from circuitkd.circuits.edges import Edge, layout_of
from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.circuits.influence import Progress
from circuitkd.circuits.patching import path_patching
from circuitkd.errors import InputError, RunError
from circuitkd.models import component_nodes_of, model_label
from circuitkd.prompts import PromptGroup, Prompts
from circuitkd.runs import NO_CHECKPOINT, Checkpoint

__all__ = [
    "EDGE_METHODS",
    "EdgeScores",
    "NodeScores",
    "edge_attribution",
    "node_attribution",
]

EDGE_METHODS: tuple[str, ...] = ("eap", "eap-ig", "auto")
NODE_METHODS: tuple[str, ...] = ("atp",)

Replace = Callable[[slice, Written], Written]
SliceScores = Callable[[Replay, PromptGroup, slice, Replace], Tensor]


def edge_attribution(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    method: str = "eap-ig",
    steps: int = 5,
    ablation: str = "corrupted",
    top: int = 50,
    batch_size: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    progress: Progress | None = None,
) -> EdgeScores:
    """Estimate the effect of patching every edge, on each prompt.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        method: ``"eap"``; ``"eap-ig"``; or ``"auto"``: estimate all with EAP-IG, then measure the
            ``top`` strongest exactly with ``path_patching``.
        steps: gradients averaged for each prompt; ``"eap"`` takes one, at the clean prompt.
        ablation: what senders are replaced by: ``"corrupted"``, ``"mean"`` or ``"zero"``.
        top: how many edges ``"auto"`` verifies.
        batch_size: prompts that go through the model at once. It changes no number beyond rounding.
        checkpoint: keeps every finished slice of prompts; a later call with the same arguments
            goes on.
        progress: called as ``progress(stage, done, total)``, in prompts.

    Returns:
        ``EdgeScores``: scores [prompt, edge] in the metric's unit, in sampling order. Memory beyond
        them does not grow with the number of prompts.

    Raises:
        InputError: unknown method or ablation, no prompts, steps below 1.
        RunError: gradients are NaN or infinite.

    Source: Syed et al. 2023 (EAP); Hanna et al. 2024 (EAP-IG).

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> scores = edge_attribution(student, prompts, steps=2)
    >>> scores.scores.shape[1] == len(scores.edges) == len(scores.frame)
    True
    """
    known = check_arguments(prompts, ablation, batch_size)
    if method not in EDGE_METHODS:
        raise InputError(f"Unknown method {method!r}: choose one of {', '.join(EDGE_METHODS)}.")
    if steps < 1 or top < 1:
        raise InputError(f"steps and top must be at least 1, not {steps} and {top}.")
    steps = 1 if method == "eap" else steps
    points = [1.0] if method == "eap" else [(step + 0.5) / steps for step in range(steps)]

    def score(
        replay: Replay, group: PromptGroup, rows: slice, replace: Replace
    ) -> Float[Tensor, "batch edge"]:
        return _edge_scores(replay, group, rows, replace, points, prompts.metric)

    n_edges = len(layout_of(model).edges)
    scores = _scores(model, prompts, known, batch_size, progress, score, n_edges, checkpoint)
    verified = None
    if method == "auto":
        verified = _verify(model, prompts, scores, known, top, batch_size, checkpoint, progress)
    return EdgeScores(
        model=model_label(model),
        task=prompts.task,
        variant=prompts.variant,
        bos=prompts.bos,
        method=method,
        steps=steps,
        ablation=known,
        metric=prompts.metric,
        edges=layout_of(model).edges,
        scores=scores,
        verified=verified,
    )


def node_attribution(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    method: str = "atp",
    ablation: str = "corrupted",
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> NodeScores:
    """Estimate the effect of replacing each head and MLP, on each prompt.

    Arguments and errors as in ``edge_attribution``. What ``node_influence`` measures exactly with
    ``ablation="resample"`` is estimated here with ``"corrupted"``.

    Source: Nanda 2023 (attribution patching); Kramár et al. 2024 (AtP*) on where it fails.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> node_attribution(student, prompts).scores.shape
    torch.Size([8, 18])
    """
    known = check_arguments(prompts, ablation, batch_size)
    if method not in NODE_METHODS:
        raise InputError(f"Unknown method {method!r}: choose one of {', '.join(NODE_METHODS)}.")

    def score(
        replay: Replay, group: PromptGroup, rows: slice, replace: Replace
    ) -> Float[Tensor, "batch node"]:
        return _node_scores(replay, group, rows, replace, prompts.metric)

    nodes = component_nodes_of(model)
    return NodeScores(
        model=model_label(model),
        task=prompts.task,
        variant=prompts.variant,
        bos=prompts.bos,
        method=method,
        ablation=known,
        metric=prompts.metric,
        nodes=nodes,
        scores=_scores(model, prompts, known, batch_size, progress, score, len(nodes)),
    )


@torch.inference_mode(False)
def _scores(
    model: TransformerBridge,
    prompts: Prompts,
    ablation: Ablation,
    batch_size: int | None,
    progress: Progress | None,
    score: SliceScores,
    width: int,
    checkpoint: Checkpoint = NO_CHECKPOINT,
) -> Float[Tensor, "prompt column"]:
    """Scores of all prompts, slice by slice."""
    scores = torch.zeros(len(prompts), width)
    done = 0
    for number, group in enumerate(prompts.groups):
        replay = Replay(model, group.clean, group.answer)
        n_pos = group.clean.shape[1]
        rows = rows_per_batch(model, n_pos, batch_size)
        replace = Replacements(replay, group, ablation, rows)
        for part in prompt_slices(replay, len(group.clean), n_pos, rows):
            key = f"attribution.{number}.{part.start}-{part.stop}"
            if (kept := checkpoint.get(key)) is None:
                kept = {"scores": score(replay, group, part, replace).cpu()}
                checkpoint.put(key, kept)
            scores[group.index[part]] = kept["scores"]
            done += part.stop - part.start
            if progress is not None:
                progress(f"Attributing {model_label(model)}", done, len(prompts))
    if not torch.isfinite(scores).all():
        raise RunError(f"{model_label(model)} gave NaN or infinite gradients; try dtype float32.")
    return scores


def _edge_scores(
    replay: Replay,
    group: PromptGroup,
    prompts: slice,
    replace: Replace,
    points: list[float],
    metric: str,
) -> Float[Tensor, "batch edge"]:
    places = ("q", "k", "v", "mlp_in")
    if points == [1.0]:
        embed = replay.embed(group.clean[prompts])
        seen = metric_gradients(replay, group, metric, prompts, embed, places)
        clean = seen.written
        return edge_products(replay, seen, sender_changes(replay, clean, replace(prompts, clean)))
    clean = trace(replay, group.clean[prompts], prompts.stop - prompts.start).written
    other = replace(prompts, clean)
    changes = sender_changes(replay, clean, other)
    total = torch.zeros(())
    for point in points:
        embed = other.embed + point * (clean.embed - other.embed)
        seen = metric_gradients(replay, group, metric, prompts, embed, places)
        total = total + edge_products(replay, seen, changes).cpu()
    return total / len(points)


def _node_scores(
    replay: Replay,
    group: PromptGroup,
    prompts: slice,
    replace: Replace,
    metric: str,
) -> Float[Tensor, "batch node"]:
    embed = replay.embed(group.clean[prompts])
    found = metric_gradients(replay, group, metric, prompts, embed, ("z", "mlp"))
    seen, clean = found.gradient, found.written
    other = replace(prompts, clean)
    parts = []
    for layer in range(replay.n_layers):
        z = seen[f"z.{layer}"].reshape(clean.z[layer].shape)
        change = other.z[layer] - clean.z[layer]
        parts.append(einsum(change.float(), z.float(), "b pos head d, b pos head d -> b head"))
        mlp = (other.mlp[layer] - clean.mlp[layer]).float() * seen[f"mlp.{layer}"].float()
        parts.append(mlp.sum((1, 2))[:, None])
    return torch.cat(parts, 1)


def _verify(
    model: TransformerBridge,
    prompts: Prompts,
    scores: Float[Tensor, "prompt edge"],
    ablation: Ablation,
    top: int,
    batch_size: int | None,
    checkpoint: Checkpoint,
    progress: Progress | None,
) -> EdgeEffects:
    edges: tuple[Edge, ...] = layout_of(model).edges
    strongest = scores.mean(0).abs().topk(min(top, len(edges))).indices
    return path_patching(
        model,
        prompts,
        edges=[edges[number] for number in strongest.tolist()],
        mode="direct",
        ablation=ablation,
        batch_size=batch_size,
        checkpoint=checkpoint,
        progress=progress,
    )
