"""``find_circuit``: one signature for all ways to find a circuit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._shares import require_competent
from circuitkd.circuits.ablated import NodeAblator
from circuitkd.circuits.attribution import EdgeScores, edge_attribution
from circuitkd.circuits.circuit import Circuit
from circuitkd.circuits.edge_pruning import EDGE_THRESHOLD, prune_edges
from circuitkd.circuits.influence import ABLATIONS, Progress
from circuitkd.circuits.patching import EdgeEffects, path_patching
from circuitkd.circuits.pruning import PUBLISHED_THRESHOLD, prune_nodes
from circuitkd.errors import InputError
from circuitkd.models import model_label
from circuitkd.prompts import Prompts
from circuitkd.runs import NO_CHECKPOINT, Checkpoint

SCORED = ("path-patching", "eap", "eap-ig", "auto")
"""Methods that score every edge on its own; the strongest make the circuit."""
METHODS = ("prune", "acdc", *SCORED)


@dataclass(frozen=True)
class Discovery:
    """A circuit, and the scores of all edges where the method gives them."""

    circuit: Circuit
    scores: EdgeEffects | EdgeScores | None

    def __repr__(self) -> str:
        return "\n".join(repr(part) for part in (self.circuit, self.scores) if part is not None)


def find_circuit(
    model: TransformerBridge,
    prompts: Prompts,
    method: str = "prune",
    *,
    threshold: float | None = None,
    top: int | None = None,
    ablation: str | None = None,
    steps: int = 5,
    batch_size: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    progress: Progress | None = None,
) -> Discovery:
    """Find the circuit with which a model does a task.

    - ``"prune"``: greedy node pruning (``prune_nodes``); a node circuit.
    - ``"acdc"``: greedy edge pruning (``prune_edges``).
    - ``"path-patching"``, ``"eap"``, ``"eap-ig"``: score every edge on its own, exactly or by
      gradients, and take the strongest; ``"auto"`` verifies the strongest 50 of ``"eap-ig"``.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        method: see above.
        threshold: a share of the model's metric. ``"prune"``: what may be lost in all (by default
            0.2, as published). Others: an edge is kept whose effect or score is at least this
            (by default 0.002); losses add up.
        top: take this many of the strongest scored edges instead.
        ablation: what replaces what is left out: ``"mean"``, ``"zero"`` or ``"resample"`` (the
            paired corrupted prompt). By default ``"mean"`` for ``"prune"`` and ``"resample"`` for
            edges.
        steps: of ``"eap-ig"`` and ``"auto"``.
        batch_size: prompts that go through the model at once.
        checkpoint: keeps finished parts; a later call with the same arguments goes on.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        InputError: an argument that cannot be used.
        RunError: the model does not do the task.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> found = find_circuit(student, prompts, "eap", top=40)
    >>> found.circuit.method, len(found.scores.edges)
    ('eap', 310)
    """
    check_method(method, top, ablation, threshold)
    ablation = ablation or ("mean" if method == "prune" else "resample")
    if method == "prune":
        circuit = prune_nodes(
            model,
            prompts,
            PUBLISHED_THRESHOLD if threshold is None else threshold,
            ablation=ablation,
            batch_size=batch_size,
            checkpoint=checkpoint,
            progress=progress,
        )
        return Discovery(circuit, None)
    carried = "corrupted" if ablation == "resample" else ablation
    scores = None
    if method in SCORED:
        _require_competent(model, prompts, batch_size)
        scores = _scorer(method, steps)(
            model,
            prompts,
            ablation=carried,
            batch_size=batch_size,
            checkpoint=checkpoint,
            progress=progress,
        )
    circuit = prune_edges(
        model,
        prompts,
        threshold=EDGE_THRESHOLD if threshold is None else threshold,
        method="acdc" if scores is None else "top-k",
        scores=scores,
        k=top,
        ablation=carried,
        batch_size=batch_size,
        checkpoint=checkpoint,
        progress=progress,
    )
    return Discovery(replace(circuit, method=method), scores)


def check_method(
    method: str, top: int | None, ablation: str | None, threshold: float | None
) -> None:
    """``InputError`` unless these arguments of ``find_circuit`` go together."""
    if method not in METHODS:
        raise InputError(f"Unknown method {method!r}: choose one of {', '.join(METHODS)}.")
    if ablation is not None and ablation not in ABLATIONS:
        raise InputError(f"Unknown ablation {ablation!r}: choose one of {', '.join(ABLATIONS)}.")
    if top is not None and method not in SCORED:
        raise InputError(f"A number of edges goes with {', '.join(SCORED)}, not with {method!r}.")
    if top is not None and threshold is not None:
        raise InputError("Give either a threshold or a number of edges, not both.")


def _require_competent(model: TransformerBridge, prompts: Prompts, batch_size: int | None) -> None:
    """``RunError`` where the model does not do the task, before its edges are scored."""
    runs = NodeAblator(model, prompts, ablation="zero", batch_size=batch_size)
    require_competent(runs.metric(runs.nodes), model_label(model))


def _scorer(method: str, steps: int) -> Callable[..., EdgeEffects | EdgeScores]:
    if method == "path-patching":
        return path_patching
    return lambda *args, **options: edge_attribution(*args, method=method, steps=steps, **options)
