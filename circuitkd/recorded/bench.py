"""The quantities of a record, measured on models with circuitkd's own functions."""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._shares import is_competent, percent_of
from circuitkd.circuits.activations import Components, record_components
from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.circuits.evaluation import CircuitReport, evaluate_circuit
from circuitkd.circuits.influence import Influence, node_influence
from circuitkd.circuits.pruning import prune_nodes
from circuitkd.compare._loading import Progress
from circuitkd.compare._measures_paper import paper_pairs
from circuitkd.compare._robustness_inputs import answers, parameter_count
from circuitkd.compare.alignment import paper_alignment
from circuitkd.compare.robustness import PairedBrittleness, ablation_brittleness, brittleness_of
from circuitkd.compare.similarity import paper_similarity
from circuitkd.metrics import bootstrap_interval, bootstrap_means, percentile_interval
from circuitkd.models import model_label
from circuitkd.nodes import Node, component_nodes
from circuitkd.prompts import Prompts, compared_positions
from circuitkd.recorded.measured import Measured
from circuitkd.recorded.schema import Line, Record

_PAIR = ("teacher", "student")


class Bench:
    """Models and prompts to measure a record's lines on. Nothing is computed twice.

    Args:
        record: says the ablation, the threshold and the circuits.
        models: side -> model.
        prompts: side -> its prompts.
        batch_size: prompts that go through a model at once.
        progress: called as ``progress(stage, done, total)``.

    >>> import circuitkd as ckd
    >>> from circuitkd.recorded.schema import shipped_record
    >>> model = ckd.load_model("tiny-student")
    >>> prompts = ckd.load_task("numerals").sample(model, n=8)
    >>> record = shipped_record("gpt2-numerals")
    >>> bench = Bench(record, {"model": model}, {"model": prompts})
    >>> bench.measure(record.lines[0]).missing
    'tiny-student has no head 7.11'
    """

    def __init__(
        self,
        record: Record,
        models: Mapping[str, TransformerBridge],
        prompts: Mapping[str, Prompts],
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.record, self.models, self.prompts = record, models, prompts
        self.batch_size, self.progress = batch_size, progress
        self._clean: dict[str, Float[Tensor, "prompt"]] = {}
        self._influences: dict[str, Influence] = {}
        self._reports: dict[tuple[str, str], CircuitReport] = {}
        self._pruned: dict[str, Circuit] = {}

    def measure(self, line: Line) -> Measured:
        """The line's quantity, with its interval over prompts where it has one."""
        missing = self._absent(line)
        if missing is not None:
            return Measured.none(missing)
        measures: dict[str, Callable[[Line], Measured]] = {
            "clean": self._clean_metric,
            "retained_pct": self._retained,
            "mean_change_pct": self._mean_change,
            "profile_correlation": self._correlation,
            "circuit_retained_pct": self._circuit_retained,
            "leave_one_out_pct": self._leave_one_out,
            "pruned_retained_pct": self._pruned_retained,
            "pruned_heads": self._pruned_size,
            "pruned_mlps": self._pruned_size,
            "pruned_overlap_pct": self._pruned_overlap,
            "mean_drop_pct": self._drop_statistic,
            "severity": self._drop_statistic,
            "gini": self._drop_statistic,
            "head_similarity": self._head_similarity,
            "paper_alignment": self._paper_alignment,
        }
        if line.quantity not in measures:
            return Measured.none("circuitkd does not measure it")
        return measures[line.quantity](line)

    # ------------------------------------------------------------------ what cannot be measured

    def _absent(self, line: Line) -> str | None:
        """Why the models at hand cannot have such a number."""
        sides = [str(line.side)] if line.side in self.models else list(self.models)
        owner = sides[0] if len(sides) == 1 else "teacher"
        names = {"student": [line.match]}
        names[owner] = [*names.get(owner, []), line.node, *self._circuit_names(line)]
        for side in {side for side in names if side in self.models}:
            unknown = {name for name in names[side] if name} - self._names(side)
            if unknown:
                first = min((Node.parse(name) for name in unknown), key=_place)
                kind = "head " if first.kind == "head" else ""
                return f"{model_label(self.models[side])} has no {kind}{first.label}"
        if line.quantity == "clean" or line.quantity in ("head_similarity", "paper_alignment"):
            return None
        fails = [side for side in sides if not is_competent(self._metric(side))]
        if fails:
            label = model_label(self.models[fails[0]])
            return f"{label} does not do this task, so percentages of its metric mean nothing"
        return None

    def _circuit_names(self, line: Line) -> tuple[str, ...]:
        return () if line.circuit is None else self.record.circuits[line.circuit]

    def _names(self, side: str) -> set[str]:
        config = self.models[side].cfg
        return {node.name for node in component_nodes(config.n_layers, config.n_heads)}

    # ------------------------------------------------------------------ measuring once

    def _metric(self, side: str) -> Float[Tensor, "prompt"]:
        if side not in self._clean:
            found = answers(self.models[side], self.prompts[side], batch_size=self.batch_size)
            self._clean[side] = found.metric[0]
        return self._clean[side]

    def _influence(self, side: str) -> Influence:
        if side not in self._influences:
            self._influences[side] = node_influence(
                self.models[side],
                self.prompts[side],
                ablation=self.record.ablation,
                batch_size=self.batch_size,
                progress=self.progress,
            )
        return self._influences[side]

    def _report(self, side: str, name: str) -> CircuitReport:
        if (side, name) not in self._reports:
            model = self.models[side]
            wanted = [line.circuit for line in self.record.lines if line.node is not None]
            self._reports[side, name] = evaluate_circuit(
                model,
                self.prompts[side],
                Circuit.build(Sizes.of(model), nodes=self.record.circuits[name]),
                ablation=self.record.ablation,
                minimality=name in wanted,
                tests=False,
                batch_size=self.batch_size,
                progress=self.progress,
            )
        return self._reports[side, name]

    def _circuit(self, side: str) -> Circuit:
        if side not in self._pruned:
            self._pruned[side] = prune_nodes(
                self.models[side],
                self.prompts[side],
                self.record.threshold,
                ablation=self.record.ablation,
                batch_size=self.batch_size,
                progress=self.progress,
            )
        return self._pruned[side]

    @cached_property
    def _components(self) -> tuple[Components, Components]:
        groups = (self.prompts[side].groups for side in _PAIR)
        places = [compared_positions(*pair) for pair in zip(*groups, strict=True)]
        teacher, student = (
            record_components(
                self.models[side],
                self.prompts[side],
                [own[number] for own in places],
                batch_size=self.batch_size,
                progress=self.progress,
            )
            for number, side in enumerate(_PAIR)
        )
        return teacher, student

    @cached_property
    def _similarity(self) -> pd.DataFrame:
        teacher, student = self._components
        rows, columns = ([node.name for node in own.nodes] for own in (teacher, student))
        return pd.DataFrame(paper_similarity(teacher, student), index=rows, columns=columns)

    @cached_property
    def _brittleness(self) -> PairedBrittleness:
        return brittleness_of(
            {side: self._influence(side) for side in _PAIR},
            {side: parameter_count(self.models[side]) for side in _PAIR},
        )

    # ------------------------------------------------------------------ one model

    def _clean_metric(self, line: Line) -> Measured:
        metric = self._metric(str(line.side))
        return Measured(float(metric.double().mean()), *bootstrap_interval(metric.double().numpy()))

    def _retained(self, line: Line) -> Measured:
        influence = self._influence(str(line.side))
        column = influence.nodes.index(Node.parse(str(line.node)))
        ablated = influence.clean + influence.effects[:, column]
        return Measured(*percent_of(ablated, influence.clean))

    def _mean_change(self, line: Line) -> Measured:
        """The mean over heads of what is lost, in points; what is gained counts as nothing."""
        influence = self._influence(str(line.side))
        heads = [place for place, node in enumerate(influence.nodes) if node.kind == "head"]
        effects, clean = influence.effects[:, heads], influence.clean[:, None]
        both = torch.cat([effects, clean], dim=1).double().numpy()
        draws = bootstrap_means(both)
        low, high = percentile_interval(_losses(draws[draws[:, -1] > 0]))
        return Measured(float(_losses(both.mean(0))), float(low), float(high))

    def _correlation(self, line: Line) -> Measured:
        """Between the recorded and the measured effect of every node that both know."""
        influence = self._influence(str(line.side))
        recorded = {str(side): own for side, own in self.record.profiles.items()}.get(
            str(line.side), {}
        )
        effects = influence.effects.double().mean(0).tolist()
        measured = dict(zip((node.name for node in influence.nodes), effects, strict=True))
        known = [name for name in recorded if name in measured]
        if len(known) < len(measured):
            return Measured.none(f"the record does not cover all of {influence.model}")
        pairs = np.array([[recorded[name], measured[name]] for name in known])
        return Measured(float(np.corrcoef(pairs.T)[0, 1]))

    def _drop_statistic(self, line: Line) -> Measured:
        if line.side in self.models:
            own = ablation_brittleness(self._influence(str(line.side))).statistics
            row = own.loc[line.quantity]
            names = ("value", "prompts_low", "prompts_high")
            value, low, high = (float(row[name]) for name in names)
            return Measured(value, low, high)
        pair = self._brittleness
        if line.side == "per_tenth" and pair.compression is None:
            return Measured.none("the student does not have fewer parameters than its teacher")
        scale = 1.0 if line.side == "difference" else 1 / (10 * (pair.compression or 1.0))
        row = pair.frame.loc[line.quantity]
        # The published difference is the mean over resampled components.
        names = ("components_mean", "prompts_low", "prompts_high")
        value, low, high = (scale * float(row[name]) for name in names)
        return Measured(value, low, high)

    # ------------------------------------------------------------------ circuits

    def _circuit_retained(self, line: Line) -> Measured:
        report = self._report(str(line.side), str(line.circuit))
        return Measured(*percent_of(report.kept, report.full))

    def _leave_one_out(self, line: Line) -> Measured:
        report = self._report(str(line.side), str(line.circuit))
        node = Node.parse(str(line.node))
        if node not in report.circuit.nodes:
            return Measured.none(f"{node.label} is not in the circuit {line.circuit}")
        column = list(report.circuit.nodes).index(node)
        return Measured(*percent_of(report.kept + report.node_effects[:, column], report.full))

    def _pruned_retained(self, line: Line) -> Measured:
        return Measured(float(self._circuit(str(line.side)).provenance["retained_pct"]))

    def _pruned_size(self, line: Line) -> Measured:
        kind = "head" if line.quantity == "pruned_heads" else "mlp"
        nodes = self._circuit(str(line.side)).nodes
        return Measured(float(sum(node.kind == kind for node in nodes)))

    def _pruned_overlap(self, line: Line) -> Measured:
        """Nodes in both circuits, in percent of the nodes in either."""
        found = self._circuit(str(line.side)).node_set
        recorded = {Node.parse(name) for name in self.record.circuits[str(line.circuit)]}
        return Measured(100 * len(found & recorded) / max(1, len(found | recorded)))

    # ------------------------------------------------------------------ two models

    def _head_similarity(self, line: Line) -> Measured:
        return self._of_one_width() or Measured(
            float(self._similarity.loc[line.node, line.match])  # pyright: ignore[reportArgumentType]
        )

    def _paper_alignment(self, line: Line) -> Measured:
        teacher, student = (self._influence(side) for side in _PAIR)
        mean = [own.effects.double().numpy().mean(0) for own in (teacher, student)]
        return self._of_one_width() or Measured(
            paper_alignment(
                paper_pairs(
                    abs(mean[0]), abs(mean[1]), self._similarity.to_numpy(),
                    teacher.nodes, student.nodes,
                )
            )
        )  # fmt: skip

    def _of_one_width(self) -> Measured | None:
        """The paper's MLP measure does not exist for models of two widths."""
        widths = {self.models[side].cfg.d_model for side in _PAIR}
        return Measured.none("the models differ in width") if len(widths) > 1 else None


def _losses(means: Float[np.ndarray, "*draw column"]) -> Float[np.ndarray, "*draw"]:
    """From mean effects of heads, and the mean clean metric in the last column."""
    return np.asarray(100 * np.minimum(0, means[..., :-1] / means[..., -1:]).mean(-1))


def _place(node: Node) -> tuple[int, int]:
    return (node.layer or 0, -1 if node.head is None else node.head)
