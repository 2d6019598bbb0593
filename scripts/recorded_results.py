"""Make circuitkd/recorded/data/*.json from a directory of golden values.

    python scripts/recorded_results.py GOLDEN [--out DIRECTORY]

GOLDEN holds the published notebooks' outputs, parsed to JSON (numerals_gpt2.json, ...). Only what
is known to be sound gets a tolerance; everything else gets the reason why it cannot be reproduced.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import recorded_words as words

from circuitkd.recorded.schema import DATA_DIRECTORY, SCHEMA, Record

Json = dict[str, Any]

PAPER = "Distilled Circuits (arXiv:2505.10822), public notebooks"
LAN = "Lan, Torr and Barez (arXiv:2311.04131), recorded outputs"
PAIR = {"teacher": "gpt2", "student": "distilgpt2"}

# Published prompts are not at hand, so a new measurement draws others from the same templates.
POINTS = 5.0
"""Least tolerance of a percentage of the clean metric."""
SHARE = 0.2
"""Tolerance as a share of the effect, where that is more."""


def node(name: str) -> str:
    """H7.11 -> a7.h11, M3 -> m3."""
    head = re.fullmatch(r"H(\d+)\.(\d+)", name)
    return f"a{head[1]}.h{head[2]}" if head else name.replace("M", "m")


def nodes_of(circuit: Json) -> list[str]:
    heads = [f"a{layer}.h{head}" for layer, head in circuit["heads"]]
    return heads + [f"m{layer}" for layer in circuit["mlps"]]


def line(quantity: str, recorded: float, unit: str = "", **fields: Any) -> Json:
    return {"quantity": quantity, "recorded": recorded, "unit": unit, **fields}


def tolerance(value: float, reference: float) -> float:
    """In points: at least ``POINTS``, or a share of the distance from ``reference``."""
    return round(max(POINTS, SHARE * abs(value - reference)), 1)


def retained(side: str, values: Iterable[tuple[str, float]]) -> list[Json]:
    return [
        line(
            "retained_pct", value, "%", side=side, node=node(name), tolerance=tolerance(value, 100)
        )
        for name, value in values
    ]


def with_reason(lines: Iterable[Json], reason: str) -> list[Json]:
    """The same numbers as ones that cannot be reproduced."""
    return [
        {key: value for key, value in each.items() if key != "tolerance"} | {"reason": reason}
        for each in lines
    ]


def strongest(retained_pct: Json, count: int) -> list[tuple[str, float]]:
    return sorted(retained_pct.items(), key=lambda item: item[1])[:count]


def profile(golden: Json) -> Json:
    """All heads, then all MLPs: the published order."""
    values = golden["head_retained_pct"] | golden["mlp_retained_pct"]
    return {node(name): value for name, value in values.items()}


def numerals(golden: Json, other_circuits: Json, cross: Json) -> Json:
    """One model on numerals: influences, pruning, the recorded circuit."""
    heads, mlps = golden["head_retained_pct"], golden["mlp_retained_pct"]
    circuit, kept = golden["circuit"], golden["circuit"]["retained_pct"]
    side: Json = {"side": "model"}
    of_circuit = side | {"circuit": "recorded"}
    change = golden["mean_recomputed"]
    gain = max(heads.items(), key=lambda item: item[1])
    lines = [
        *retained("model", [*strongest(heads, 10), gain, *mlps.items()]),
        line("mean_change_pct", change, "points", **side, tolerance=round(SHARE * -change, 2)),
        line("profile_correlation", 1.0, **side, tolerance=0.1),
        line("circuit_retained_pct", kept, "%", **of_circuit, tolerance=8.0),
        *(
            line(
                "leave_one_out_pct", value, "%", **of_circuit,
                node=node(name), tolerance=tolerance(value, kept),
            )
            for name, value in golden["leave_one_out_in_circuit_pct"].items()
        ),
        *pruned(circuit, of_circuit),
        line("pruned_retained_pct", kept, "%", **side, tolerance=2.0),
        *(
            line("circuit_retained_pct", cross[name], "%", **side, circuit=name, tolerance=10.0)
            for name in other_circuits
        ),
    ]  # fmt: skip
    return {
        "source": PAPER,
        "models": {"model": golden["model"]},
        "task": "numerals.yaml",
        "prompts": golden["n_prompts"],
        "threshold": golden["threshold_pct"] / 100,
        "circuits": {"recorded": nodes_of(circuit), **other_circuits},
        "profiles": {"model": profile(golden)},
        "lines": lines,
    }


def pruned(circuit: Json, about: Json) -> list[Json]:
    """What pruning anew should find."""
    heads, mlps = len(circuit["heads"]), len(circuit["mlps"])
    side = {"side": about["side"]}
    return [
        line("pruned_heads", heads, "heads", **side, tolerance=max(2, round(0.3 * heads))),
        line("pruned_mlps", mlps, "MLPs", **side, tolerance=1),
        line("pruned_overlap_pct", 100.0, "%", **about, tolerance=35.0),
    ]


def lan(golden: Json, key: str, task: str, cross: Json, mlps: list[float]) -> Json:
    """GPT-2 on one of the sequence tasks of Lan et al.; ``cross``: what each circuit retains."""
    names = {"numerals": "numerals", "numwords": "number words", "months": "months"}
    side: Json = {"side": "model"}
    known = {own: name for own, name in names.items() if cross or own == key}
    lines = [
        *retained("model", [(f"M{layer}", value) for layer, value in enumerate(mlps)]),
        *(
            line(
                "circuit_retained_pct", cross[f"{own}_circuit"], "%", **side,
                circuit=name, tolerance=8.0 if own == key else 10.0,
            )
            for own, name in known.items()
            if cross
        ),
        *pruned(golden["circuits"][key], side | {"circuit": names[key]}),
    ]  # fmt: skip
    return {
        "source": LAN,
        "models": {"model": "gpt2"},
        "task": task,
        "prompts": 1536,
        "threshold": golden["threshold"] / 100,
        "circuits": {name: nodes_of(golden["circuits"][own]) for own, name in known.items()},
        "lines": lines,
    }


def drops(pair: Json) -> list[Json]:
    """The robustness statistics of a pair, with a tolerance of a fifth."""
    rows = []
    for side in ("teacher", "student"):
        mean, low, high = pair[f"{side}_mean"]
        rows.append(line("mean_drop_pct", mean, "%", low=low, high=high, side=side))
    mean, low, high = pair["delta_mean_bootstrap"]
    slope = [pair["beta_mean_bootstrap"], *pair["beta_mean_ci"]]
    value, floor, top = (each / 10 for each in slope)
    rows += [
        line("mean_drop_pct", mean, "points", low=low, high=high, side="difference"),
        line("mean_drop_pct", value, "points", low=floor, high=top, side="per_tenth"),
        *(line("severity", pair[f"{s}_severity"], side=s) for s in ("teacher", "student")),
        *(line("gini", pair[f"{s}_gini"], side=s) for s in ("teacher", "student")),
    ]
    return [row | {"tolerance": round(SHARE * row["recorded"], 4)} for row in rows]


def robustness(summary: Json) -> Json:
    alignment = line("paper_alignment", 0.9508, reason=f"{words.POSITION} (compression notebook)")
    return {
        "source": PAPER,
        "models": PAIR,
        "task": "numerals.yaml",
        "prompts": 1536,
        "lines": [*drops(summary["pairs"]["GPT2"]), alignment],
    }


def ioi(case: Json, alignment: Json) -> Json:
    """The IOI case study; clean metrics have a wide tolerance, for the templates are others."""
    clean = case["baseline_logit_diff"]
    mlps = case["teacher_mlp_retained_pct"]
    heads = strongest(case["student_head_retained_pct"], 3)
    student = [*heads, *case["student_mlp_retained_pct"].items()]
    lines = [
        *(
            line("clean", clean[side], "logits", side=side, tolerance=1.0)
            for side in ("teacher", "student")
        ),
        *retained("teacher", strongest(case["teacher_head_retained_pct"], 6)),
        *with_reason(retained("teacher", [("M0", mlps["M0"])]), words.FLOORED),
        *retained("teacher", [item for item in mlps.items() if item[0] != "M0"]),
        *with_reason(retained("student", student), words.FAILS),
        *(
            line(
                "head_similarity", role["sim"], reason=words.PADDED,
                node=node(role["teacher"]), match=node(role["student"]),
            )
            for role in case["head_roles"]
        ),
        line(
            "paper_alignment", alignment["recomputed"]["score"],
            reason=words.ANOMALY.format(
                here=alignment["baseline_logit_diff"]["teacher"],
                other=f"the case study's {clean['teacher']:+.3f}",
            ),
        ),
    ]  # fmt: skip
    return {
        "source": PAPER,
        "models": PAIR,
        "task": "ioi",
        "prompts": case["n_prompts"],
        "ablation": "zero",
        "lines": lines,
    }


def bert(summary: Json) -> Json:
    """BERT: clean metrics and score as the notebook prints them."""
    lines = [
        line("clean", 1.1650, "logits", side="teacher", reason=words.RENUMBERED),
        line("clean", 0.4904, "logits", side="student", reason=words.RENUMBERED),
        *with_reason(drops(summary["pairs"]["BERT"]), words.POSITION),
        line("paper_alignment", 0.8224, reason=words.RANK_ONE),
    ]
    return {
        "source": PAPER,
        "models": {"teacher": "bert-base-uncased", "student": "distilbert-base-uncased"},
        "task": "numerals.yaml",
        "prompts": 101,
        "ablation": "zero",
        "bos": "auto",  # an encoder has its own special tokens
        "processed": False,  # the layer norms of post-norm blocks cannot be folded
        "lines": lines,
    }


def llama(summary: Json) -> Json:
    return {
        "source": PAPER,
        "models": {
            "teacher": "meta-llama/Llama-3.1-8B",
            "student": "nvidia/Llama-3.1-Minitron-4B-Depth-Base",
        },
        "task": "numerals.yaml",
        "prompts": 1024,
        "bos": "auto",
        "processed": False,  # these notebooks hook the released networks
        "lines": with_reason(drops(summary["pairs"]["Llama_as_coded"]), words.SLICE),
    }


def number_words_pair() -> Json:
    """GPT-2 against DistilGPT2 on number words, as the alignment notebook prints it."""
    reason = words.ANOMALY.format(here=0.220, other="the sane ablations of Lan et al.")
    return {
        "source": PAPER,
        "models": PAIR,
        "task": "number_words.yaml",
        "prompts": 100,
        "lines": [
            line("clean", 0.220, "logits", side="teacher", reason=reason),
            line("clean", -1.824, "logits", side="student", reason=reason),
            line("paper_alignment", 0.8954, reason=reason),
        ],
    }


def qa() -> Json:
    """SimpleQA, as the notebook prints it."""
    return {
        "source": PAPER,
        "models": PAIR,
        "lines": [
            line("clean", -0.204, "logits", side="teacher", reason=words.LAST_PAD),
            line("clean", -0.102, "logits", side="student", reason=words.LAST_PAD),
            line("paper_alignment", 0.9436, reason=words.LAST_PAD),
        ],
    }


def mlp_outputs(golden: Json) -> Json:
    """Cosines of MLP outputs, averaged over the tokens of one prompt."""
    values = golden["token_cosine"]["values"]
    places = [(pair.split(","), own["all"]) for pair, own in values.items()]
    return {
        "source": PAPER,
        "models": PAIR,
        "lines": [
            line("token_cosine", value, node=f"m{t}", match=f"m{s}", reason=words.ONE_PROMPT)
            for (t, s), value in places
        ],
    }


def arithmetic(models: dict[str, Json], summary: Json, alignment: Json) -> Json:
    """The published formulas on the published raw values: exact, and no weights needed."""
    exact = [row | {"tolerance": 1e-6} for row in drops(summary["pairs"]["GPT2"])]
    score = alignment["recomputed"]["score"]
    teacher, student = summary["pairs"]["GPT2"]["params"]
    return {
        "source": PAPER,
        "models": PAIR,
        "profiles": {side: profile(golden) for side, golden in models.items()},
        "pairs": [row[2:] for row in alignment["pairs"]],
        "parameters": {"teacher": teacher, "student": student},
        "lines": [*exact, line("paper_alignment", score, tolerance=1e-6)],
    }


def records(golden: Path) -> dict[str, Json]:
    """Name -> record."""

    def read(name: str) -> Json:
        return json.loads((golden / f"{name}.json").read_text())

    teacher, student = read("numerals_gpt2"), read("numerals_distilgpt2")
    sequences, summary = read("lan_reference"), read("robustness_summary")
    case, alignment = read("ioi_case_study"), read("alignment_ioi")
    cross = sequences["cross_task_retained_pct"]
    others = {
        name: nodes_of(sequences["circuits"][key])
        for key, name in (("numwords", "number words"), ("months", "months"))
    }
    on_numerals = {
        "number words": cross["on_numerals"]["numwords_circuit"],
        "months": cross["on_numerals"]["months_circuit"],
    }
    number_words = sequences["mlp_retained_pct"]["numwords"]
    models = {"teacher": teacher, "student": student}
    found = {
        "gpt2-numerals": numerals(teacher, others, on_numerals),
        "distilgpt2-numerals": numerals(student, {}, {}),
        "lan-number-words": lan(
            sequences, "numwords", "number_words.yaml", cross["on_numwords"], number_words
        ),
        "lan-months": lan(sequences, "months", "months.yaml", {}, []),
        "robustness": robustness(summary),
        "ioi": ioi(case, alignment),
        "bert-numerals": bert(summary),
        "llama-numerals": llama(summary),
        "number-words-pair": number_words_pair(),
        "qa": qa(),
        "mlp-outputs": mlp_outputs(read("mlp_distillation")),
        "arithmetic": arithmetic(models, summary, alignment),
    }
    return {
        name: {"schema": SCHEMA, "name": name, "title": words.TITLES[name], **record}
        for name, record in found.items()
    }


def text_of(record: Json) -> str:
    """A record as a file: validated, a line of JSON for each of its lines."""
    Record.model_validate(record)
    whole = json.dumps({**record, "lines": []}, indent=1)
    lines = ",\n  ".join(json.dumps(each) for each in record["lines"])
    # Long lists of numbers and names are easier to read in few lines than in many.
    whole = re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s*\n\s*", " ", m[0]), whole)
    return whole.replace('"lines": []', f'"lines": [\n  {lines}\n ]') + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the recorded results.")
    parser.add_argument("golden", type=Path, help="the directory of golden values")
    parser.add_argument("--out", type=Path, default=DATA_DIRECTORY, help="where the records go")
    arguments = parser.parse_args()
    for name, record in records(arguments.golden).items():
        (arguments.out / f"{name}.json").write_text(text_of(record))
        print(f"{name}: {len(record['lines'])} lines")


if __name__ == "__main__":
    main()
