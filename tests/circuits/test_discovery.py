"""``find_circuit`` refuses what cannot be done before it begins."""

import dataclasses

import pytest
from random_models import random_bridge, random_prompts
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.discovery import SCORED, find_circuit
from circuitkd.errors import InputError, RunError
from circuitkd.prompts import Prompts


def failed_by(model: TransformerBridge) -> Prompts:
    """Prompts whose answers are what the model finds least likely."""
    prompts = random_prompts((6,), (8,))
    (group,) = prompts.groups
    logits = model(group.clean)[:, -1]
    wrong = dataclasses.replace(group, correct=logits.argmin(-1), incorrect=logits.argmax(-1))
    return dataclasses.replace(prompts, groups=(wrong,))


@pytest.mark.parametrize("method", SCORED)
def test_a_model_that_fails_the_task_is_told_before_its_edges_are_scored(method: str) -> None:
    model = random_bridge("gpt2", layers=1)
    stages: list[str] = []
    with pytest.raises(RunError, match="does not do this task"):
        find_circuit(
            model, failed_by(model), method, progress=lambda stage, *_: stages.append(stage)
        )
    assert stages == []


def test_either_a_threshold_or_a_number_of_edges() -> None:
    model = random_bridge("gpt2", layers=1)
    with pytest.raises(InputError, match="either a threshold or a number"):
        find_circuit(model, random_prompts(), "eap", threshold=0.1, top=5)
