"""What a reader of a comparison must know, in words."""

from collections.abc import Mapping
from typing import Any

from circuitkd.circuits.influence_result import Influence

FEW_PROMPTS = 32

UNPROCESSED = (
    "A model that was given already loaded is used as it is: preset 'paper' cannot fold its layer "
    "norms. Give names or directories to have them loaded the paper's way."
)
NO_PAPER = (
    "The paper's number does not exist for this pair: its MLP similarity needs models of one width."
)


def competence_warnings(influences: Mapping[str, Influence]) -> list[str]:
    notes = []
    for side, influence in influences.items():
        if influence.competent:
            continue
        low, high = influence.clean_interval
        notes.append(
            f"The {side} {influence.model} does not do this task: its mean metric is "
            f"{float(influence.clean.mean()):.3f} {influence.unit} [{low:.3f}, {high:.3f}], which "
            "is not above 0. Its influences (in "
            f"{influence.unit}, no percentages) say what moves its wrong answers, so the alignment "
            "is not evidence that the student solves the task the teacher's way."
        )
    return notes


def sample_warnings(n: int, config: Mapping[str, Any]) -> list[str]:
    notes = []
    if n < FEW_PROMPTS:
        notes.append(
            f"Only {n} prompts: the numbers are rough and their intervals too narrow; take "
            f"{FEW_PROMPTS} or more."
        )
    masked = config.get("masked", {})
    if len(set(masked.values())) > 1:
        notes.append(
            "An encoder is compared with a decoder: the one sees the whole text and answers at a "
            "mask, the other sees what came before. Components are compared at the task's labelled "
            "positions only, and a head cannot attend in the same way in both."
        )
    elif config["positions"] == "labelled":
        notes.append(
            "The two tokenizers cut prompts differently: there, components are compared at the "
            "task's labelled positions only."
        )
    return notes
