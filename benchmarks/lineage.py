"""Does a matching send a student's components back to the teacher components they came from?

    python benchmarks/lineage.py [-n 64] [--seed 0] [--threads 1] [--tasks ioi numerals ...]

The bundled student began as layers 0 and 2 of the bundled teacher and then learnt its logits. Both
are compared on every shipped task, the student as it is ("trained") and as it was before training
("untrained": the teacher without layers 1 and 3), by every measure of similarity and every
matching. Also scored: the teacher against itself. Printed as Markdown: the mean over tasks of the
share-weighted part that goes home, of heads and of MLPs, and the range over tasks; then one table
task by task for the default measure.
"""

import argparse
import copy
import time
from collections.abc import Iterator

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import circuitkd as ckd
from circuitkd.circuits.activations import record_components
from circuitkd.circuits.attention import ov_circuit, qk_circuit
from circuitkd.circuits.influence import node_influence
from circuitkd.compare.lineage import matching_lineage
from circuitkd.compare.matching import MATCHINGS
from circuitkd.compare.similarity import COMPONENT_MEASURES, component_similarity
from circuitkd.models import TransformerBridge, find_directory
from circuitkd.prompts import Prompts, compared_positions

KEPT = (0, 2)
CIRCUITS = {"qk_circuit": qk_circuit, "ov_circuit": ov_circuit}
HEADS_ONLY = ("attention_correlation", "attention_cosine", "attention_js", *CIRCUITS)


def students() -> dict[str, tuple[TransformerBridge, tuple[int, ...]]]:
    """Students of the bundled teacher, and the teacher layer that each of their layers came from."""
    directory = find_directory("tiny-teacher")
    network = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    untrained = ckd.load_model(with_layers(network, KEPT), tokenizer=tokenizer)
    return {
        "itself": (ckd.load_model("tiny-teacher"), tuple(range(network.config.n_layer))),
        "untrained": (untrained, KEPT),
        "trained": (ckd.load_model("tiny-student"), KEPT),
    }


def with_layers(network: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    network = copy.deepcopy(network)
    blocks = network.get_submodule("transformer.h")
    network.transformer.h = torch.nn.ModuleList([blocks[layer] for layer in layers])  # pyright: ignore
    network.config.n_layer = len(layers)
    return network


def words(prompts: Prompts) -> list[int]:
    """The tokens that the task's clean and corrupted prompts are about: their answers."""
    answers = [t for group in prompts.groups for t in (group.correct, group.incorrect)]
    return torch.cat(answers).unique().tolist()


def circuits(name: str, model: TransformerBridge, tokens: list[int]) -> torch.Tensor:
    scores = [
        CIRCUITS[name](model, layer, None, tokens, after_mlp0=layer > 0)
        for layer in range(model.cfg.n_layers)
    ]
    return torch.cat(scores)


def scored(task: str, n: int, seed: int) -> Iterator[pd.DataFrame]:
    teacher = ckd.load_model("tiny-teacher")
    for name, (student, layer_map) in students().items():
        pair = ckd.load_task(task).sample_pair(teacher, student, n, seed)
        models = (teacher, student)
        places = [compared_positions(a, b) for a, b in zip(pair[0].groups, pair[1].groups)]
        sides = [
            (node_influence(model, prompts), record_components(model, prompts, list(where)))
            for model, prompts, where in zip(models, pair, zip(*places))
        ]
        (influence, recorded), (own_influence, own) = sides
        tokens = words(pair[0])
        for measure in COMPONENT_MEASURES:
            scores = None
            if measure in CIRCUITS:
                scores = tuple(circuits(measure, model, tokens) for model in models)
            similarity = component_similarity(recorded, own, measure=measure, circuits=scores)
            frame = matching_lineage(
                influence.share(),
                own_influence.share(),
                similarity.value,
                recorded.nodes,
                own.nodes,
                layer_map,
            )
            if measure in HEADS_ONLY:
                frame = frame[frame.kind == "head"]
            yield frame.assign(task=task, student=name, measure=measure)


def percent(values: pd.Series) -> str:
    mean, low, high = 100 * values.mean(), 100 * values.min(), 100 * values.max()
    return f"{mean:.0f}" if round(low) == round(high) else f"{mean:.0f} ({low:.0f}–{high:.0f})"


def overview(frame: pd.DataFrame, student: str, column: str) -> str:
    """Markdown: a row for each measure; heads and MLPs under each matching."""
    cells = [(kind, matching) for kind in ("head", "mlp") for matching in MATCHINGS]
    part = frame[frame.student == student]

    def line(name: str, rows: pd.DataFrame, column: str) -> str:
        texts = []
        for kind, matching in cells:
            found = rows[(rows.kind == kind) & (rows.matching == matching)][column].dropna()
            texts.append(percent(found) if len(found) else "–")
        return f"| {name} | " + " | ".join(texts) + " |"

    titles = [f"{kind}s, {matching}" for kind, matching in cells]
    lines = [f"| measure | {' | '.join(titles)} |", "|---" * (len(cells) + 1) + "|"]
    lines += [
        line(f"`{measure}`", part[part.measure == measure], column)
        for measure in COMPONENT_MEASURES
    ]
    default = part[part.measure == "default"]
    suffix = "weighted_" if column == "weighted" else ""
    lines.append(line("*chance*", default, f"{suffix}chance"))
    lines.append(line("*best possible*", default, f"{suffix}attainable"))
    return "\n".join(lines)


def by_task(frame: pd.DataFrame, student: str) -> str:
    part = frame[(frame.student == student) & (frame.measure == "default")]
    part = part[part.kind == "all"]
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
    parser.add_argument("--csv", help="also write every number there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    tasks = arguments.tasks or ckd.task_names()
    frames = [f for task in tasks for f in scored(task, arguments.n, arguments.seed)]
    frame = pd.concat(frames, ignore_index=True)
    if arguments.csv:
        frame.to_csv(arguments.csv, index=False)
    took = time.perf_counter() - start
    print(
        f"{arguments.n} prompts a task, {len(tasks)} tasks, seed {arguments.seed}; {took:.0f} s\n"
    )
    for student in frame.student.unique():
        print(f"### {student}: % that goes home, weighted by influence\n")
        print(overview(frame, student, "weighted") + "\n")
        print(f"### {student}: % that goes home, every component alike\n")
        print(overview(frame, student, "accuracy") + "\n")
    for student in ("untrained", "trained"):
        print(f"### {student}, default measure, heads and MLPs, task by task\n")
        print(by_task(frame, student) + "\n")


if __name__ == "__main__":
    main()
