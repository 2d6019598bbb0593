"""Does a matching send a student's components back to the teacher components they came from?

    python benchmarks/lineage.py [-n 64] [--seed 0] [--threads 1] [--tasks ioi numerals ...]
    python benchmarks/lineage.py --zoo runs/validity    # and the students that validity.py made

The bundled student began as layers 0 and 2 of the bundled teacher and then learnt its logits. Both
are compared on every shipped task, the student as it is ("trained") and as it was before training
("untrained": the teacher without layers 1 and 3), by every measure of similarity and every
matching. Also scored: the teacher against itself, and with ``--zoo`` its students that began as
teacher layers, in three groups: as they began, trained, and damaged by noise. Printed as Markdown,
in percent: the part that goes home, mean over tasks and students (and range), of heads and of MLPs,
weighted by the student's influence shares and every component alike; then the default measure task
by task.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import circuitkd as ckd
from circuitkd.circuits.activations import Components, record_components
from circuitkd.circuits.attention import ov_circuit, qk_circuit
from circuitkd.circuits.influence import node_influence
from circuitkd.compare.lineage import matching_lineage
from circuitkd.compare.matching import MATCHINGS
from circuitkd.compare.similarity import COMPONENT_MEASURES, component_similarity
from circuitkd.models import TransformerBridge, find_directory
from circuitkd.prompts import Prompts

KEPT = (0, 2)
CIRCUITS = {"qk_circuit": qk_circuit, "ov_circuit": ov_circuit}
HEADS_ONLY = ("attention_correlation", "attention_cosine", "attention_js", *CIRCUITS)


@dataclass(frozen=True)
class Model:
    """A model, what it is one of, and the teacher layer that each of its layers came from."""

    group: str
    bridge: TransformerBridge
    layer_map: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """What a model did on a task."""

    share: np.ndarray
    components: Components
    circuits: dict[str, torch.Tensor]


def bundled() -> dict[str, Model]:
    directory = find_directory("tiny-teacher")
    network = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    untrained = ckd.load_model(with_layers(network, KEPT), tokenizer=tokenizer)
    return {
        "itself": Model(
            "itself", ckd.load_model("tiny-teacher"), tuple(range(network.config.n_layer))
        ),
        "untrained": Model("untrained", untrained, KEPT),
        "trained": Model("trained", ckd.load_model("tiny-student"), KEPT),
    }


def from_zoo(folder: Path) -> dict[str, Model]:
    """The students of ``validity.py --out folder`` that kept layers of the teacher."""
    found = {}
    for file in sorted((folder / "students").glob("[!.]*/recipe.json")):
        recipe = json.loads(file.read_text())
        if recipe["start"] == "random":
            continue
        group = _stage(recipe)
        layers = tuple(recipe["layers"])
        found[file.parent.name] = Model(f"zoo, {group}", ckd.load_model(file.parent), layers)
    return found


def _stage(recipe: dict[str, object]) -> str:
    if recipe["noise"]:
        return "damaged"
    return "trained" if recipe["steps"] or recipe["start"] == "bundled" else "untrained"


def with_layers(network: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    network = copy.deepcopy(network)
    blocks = network.transformer.h  # pyright: ignore[reportAttributeAccessIssue]
    network.transformer.h = torch.nn.ModuleList([blocks[layer] for layer in layers])  # pyright: ignore
    network.config.n_layer = len(layers)
    return network


def measured(model: TransformerBridge, prompts: Prompts) -> Measured:
    """``prompts`` are right for every model here: all have the teacher's tokenizer."""
    every = [torch.arange(g.clean.shape[1]).expand(len(g), -1) for g in prompts.groups]
    answers = [t for group in prompts.groups for t in (group.correct, group.incorrect)]
    words = torch.cat(answers).unique()
    circuits = {
        name: torch.cat(
            [
                circuit(model, layer, None, words, after_mlp0=layer > 0)
                for layer in range(model.cfg.n_layers)
            ]
        )
        for name, circuit in CIRCUITS.items()
    }
    influence = node_influence(model, prompts)
    return Measured(influence.share(), record_components(model, prompts, every), circuits)


def scored(task: str, models: dict[str, Model], n: int, seed: int) -> Iterator[pd.DataFrame]:
    prompts = ckd.load_task(task).sample(models["itself"].bridge, n, seed)
    found = {name: measured(model.bridge, prompts) for name, model in models.items()}
    teacher = found["itself"]
    for name, student in found.items():
        for measure in COMPONENT_MEASURES:
            circuits = None
            if measure in CIRCUITS:
                circuits = teacher.circuits[measure], student.circuits[measure]
            frame = matching_lineage(
                teacher.share,
                student.share,
                component_similarity(
                    teacher.components, student.components, measure=measure, circuits=circuits
                ).value,
                teacher.components.nodes,
                student.components.nodes,
                models[name].layer_map,
            )
            if measure in HEADS_ONLY:
                frame = frame.query("kind == 'head'")
            yield frame.assign(task=task, student=name, group=models[name].group, measure=measure)


def percent(values: pd.Series) -> str:
    mean, low, high = 100 * values.mean(), 100 * values.min(), 100 * values.max()
    return f"{mean:.0f}" if round(low) == round(high) else f"{mean:.0f} ({low:.0f}–{high:.0f})"


def least(frame: pd.DataFrame) -> float:
    return 100 * float(min(frame.accuracy.min(), frame.weighted.min()))


def overview(frame: pd.DataFrame, group: str, column: str) -> str:
    """Markdown: a row for each measure; heads and MLPs under each matching."""
    cells = [(kind, matching) for kind in ("head", "mlp") for matching in MATCHINGS]
    part = frame.query("group == @group")

    def line(name: str, rows: pd.DataFrame, column: str) -> str:
        texts = []
        for kind, matching in cells:
            values = pd.Series(rows[(rows.kind == kind) & (rows.matching == matching)][column])
            found = values.dropna()
            texts.append(percent(found) if len(found) else "–")
        return f"| {name} | " + " | ".join(texts) + " |"

    titles = [f"{kind}s, {matching}" for kind, matching in cells]
    lines = [f"| measure | {' | '.join(titles)} |", "|---" * (len(cells) + 1) + "|"]
    lines += [
        line(f"`{measure}`", part.query("measure == @measure"), column)
        for measure in COMPONENT_MEASURES
    ]
    default = part.query("measure == 'default'")
    suffix = "weighted_" if column == "weighted" else ""
    lines.append(line("*chance*", default, f"{suffix}chance"))
    lines.append(line("*best possible*", default, f"{suffix}attainable"))
    return "\n".join(lines)


def by_task(frame: pd.DataFrame, student: str) -> str:
    part = frame.query("student == @student and measure == 'default' and kind == 'all'")
    lines = ["| task | " + " | ".join(MATCHINGS) + " | best possible, transport |"]
    lines.append("|---" * (len(MATCHINGS) + 2) + "|")
    for task, rows in part.groupby("task", sort=True):
        row = rows.set_index("matching")
        values = [row.weighted[matching] for matching in MATCHINGS]
        values.append(row.weighted_attainable["transport"])
        lines.append(f"| `{task}` | " + " | ".join(f"{100 * v:.0f}" for v in values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--zoo", type=Path, help="what benchmarks/validity.py made")
    parser.add_argument("--csv", help="also write every number there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    tasks = arguments.tasks or ckd.task_names()
    models = bundled() | (from_zoo(arguments.zoo) if arguments.zoo else {})
    frames = [f for task in tasks for f in scored(task, models, arguments.n, arguments.seed)]
    frame = pd.concat(frames, ignore_index=True)
    if arguments.csv:
        frame.to_csv(arguments.csv, index=False)
    took = time.perf_counter() - start
    print(
        f"{arguments.n} prompts a task, {len(tasks)} tasks, seed {arguments.seed}; {took:.0f} s\n"
    )
    own = frame.query("student == 'itself'")
    print(f"The teacher against itself: every measure and matching at least {least(own):.0f} %.\n")
    for group in frame.group[frame.group != "itself"].unique():
        of = frame.query("group == @group").student.nunique()
        print(f"### {group} ({of}): % that goes home, weighted by influence\n")
        print(overview(frame, group, "weighted") + "\n")
        print(f"### {group} ({of}): % that goes home, every component alike\n")
        print(overview(frame, group, "accuracy") + "\n")
    for student in ("untrained", "trained"):
        print(f"### {student}, default measure, heads and MLPs, task by task\n")
        print(by_task(frame, student) + "\n")


if __name__ == "__main__":
    main()
