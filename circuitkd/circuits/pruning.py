"""Node pruning: the smallest set of heads and MLPs that still does the task.

``prune_nodes`` is the greedy procedure of "Distilled Circuits" (after Lan et al. 2023): ablate
everything outside the circuit, remove a node where the rest still retains enough of the full
model. Redundant nodes, each of which covers for the other, are not lost as they are to single-node
influence: when one of them has gone, the other can go no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._recorded import RecordedAnswers
from circuitkd.circuits._shares import require_competent
from circuitkd.circuits._sweep_result import ThresholdSweep
from circuitkd.circuits._sweeps import Pruned, check_threshold, greedy_sweeps
from circuitkd.circuits.ablated import NodeAblator
from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.influence import Progress
from circuitkd.models import model_label
from circuitkd.nodes import Node
from circuitkd.prompts import Prompts
from circuitkd.runs import NO_CHECKPOINT, Checkpoint

PUBLISHED_THRESHOLD = 0.2
PUBLISHED_THRESHOLDS = (0.10, 0.15, 0.20, 0.25, 0.30)


def prune_nodes(
    model: TransformerBridge,
    prompts: Prompts,
    threshold: float = PUBLISHED_THRESHOLD,
    *,
    order: str | Sequence[Node] = "published",
    ablation: str = "mean",
    relative_to: str = "full",
    batch_size: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    progress: Progress | None = None,
) -> Circuit:
    """Greedy node pruning: alternating sweeps until one removes nothing.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        threshold: how much of the full model's metric may be lost, as a share. The published 0.2
            is one budget for all removals together: the circuit retains more than 80 %.
        order: ``"published"`` (backward sweep first), ``"forward-first"``, or a list of all nodes.
        ablation: what replaces a node outside the circuit: ``"mean"`` (published: position by
            position over corrupted prompts), ``"zero"`` or ``"resample"``.
        relative_to: ``"full"`` (published) or ``"circuit"``: see ``greedy_sweeps``.
        batch_size: prompts that go through the model at once.
        checkpoint: keeps the scores so far; a later call with the same arguments goes on.
        progress: called as ``progress(stage, done, total)``, in candidates of the sweep.

    Returns:
        A node circuit. The score of a node is metric(circuit without it) - metric(circuit), from
        the last sweep. ``provenance["decisions"]`` lists every [sweep, node, retained %, removed].

    Raises:
        InputError: an argument that cannot be used.
        RunError: the model does not do the task, so that percentages of its metric mean nothing.

    Source: "Distilled Circuits", node pruning with T_n = 20 %.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> 0 < len(prune_nodes(student, prompts)) < 18
    True
    """
    check_threshold(threshold)
    scorer = _Retained(model, prompts, ablation, batch_size, checkpoint)
    return _pruned(scorer, threshold, order, relative_to, progress)


def threshold_sweep(
    model: TransformerBridge,
    prompts: Prompts,
    thresholds: Sequence[float] = PUBLISHED_THRESHOLDS,
    *,
    baseline: float = PUBLISHED_THRESHOLD,
    order: str | Sequence[Node] = "published",
    ablation: str = "mean",
    relative_to: str = "full",
    batch_size: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    progress: Progress | None = None,
) -> ThresholdSweep:
    """``prune_nodes`` at several thresholds: how size, faithfulness and membership depend on it.

    Thresholds share what they have in common: a set of nodes is measured once. ``baseline`` is
    the threshold that the others' node sets are compared with; it need not be among them.

    >>> import circuitkd as ckd
    >>> student = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(student, n=8, seed=0)
    >>> sweep = threshold_sweep(student, prompts, [0.1, 0.2])
    >>> list(sweep.frame["threshold"]), float(sweep.frame["jaccard"].iloc[1])
    ([0.1, 0.2], 1.0)
    """
    for threshold in (*thresholds, baseline):
        check_threshold(threshold)
    scorer = _Retained(model, prompts, ablation, batch_size, checkpoint)
    circuits = {
        threshold: _pruned(scorer, threshold, order, relative_to, progress)
        for threshold in sorted({*thresholds, baseline})
    }
    retained = {t: scorer.runs.metric(circuit.node_set) for t, circuit in circuits.items()}
    return ThresholdSweep.of(circuits, retained, scorer.clean, set(thresholds), baseline)


@dataclass
class _Retained:
    """The real scorer: kept nodes -> percent of the full model's mean metric."""

    model: TransformerBridge
    prompts: Prompts
    ablation: str
    batch_size: int | None
    checkpoint: Checkpoint
    known: dict[frozenset[Node], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = NodeAblator(
            self.model, self.prompts, ablation=self.ablation, batch_size=self.batch_size
        )
        self.clean = self.runs.metric(self.runs.nodes)
        self.full = require_competent(self.clean, model_label(self.model))
        self._answers = RecordedAnswers(self.checkpoint, "pruning")

    def __call__(self, kept: frozenset[Node]) -> float:
        if kept not in self.known:
            self.known[kept] = self._answers.ask(
                lambda: 100 * float(self.runs.metric(kept).double().mean()) / self.full
            )
        return self.known[kept]

    def save(self) -> None:
        """Keep what is known so far."""
        self._answers.save()


def _pruned(
    scorer: _Retained,
    threshold: float,
    order: str | Sequence[Node],
    relative_to: str,
    progress: Progress | None,
) -> Circuit:
    pruned = greedy_sweeps(
        scorer.runs.nodes,
        scorer,
        threshold,
        order=order,
        relative_to=relative_to,
        on_candidate=_reporter(progress, model_label(scorer.model)),
    )
    scorer.save()
    retained = scorer(pruned.kept)
    return Circuit(
        sizes=Sizes.of(scorer.model),
        nodes=_effects(pruned, retained, scorer.full),
        model=model_label(scorer.model),
        task=scorer.prompts.task,
        variant=scorer.prompts.variant,
        method="prune",
        ablation=scorer.ablation,
        metric=scorer.prompts.metric,
        provenance={
            "threshold": threshold,
            "relative_to": relative_to,
            "order": order if isinstance(order, str) else [node.name for node in order],
            "prompts": len(scorer.prompts),
            "seed": scorer.prompts.seed,
            "bos": scorer.prompts.bos,
            "full": scorer.full,
            "retained_pct": retained,
            "decisions": [
                [d.sweep, d.node.name, d.retained_pct, d.removed] for d in pruned.decisions
            ],
        },
    )


def _effects(pruned: Pruned, retained: float, full: float) -> dict[Node, float]:
    """metric(circuit without the node) - metric(circuit), in the metric's unit."""
    return {d.node: (d.retained_pct - retained) / 100 * full for d in pruned.last_sweep}


def _reporter(progress: Progress | None, label: str) -> Callable[[int, int, int], None] | None:
    if progress is None:
        return None
    return lambda sweep, done, total: progress(f"Pruning {label}, sweep {sweep}", done, total)
