"""What a comparison measures on request: head roles, a causal check, perturbed inputs."""

from dataclasses import replace

from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.influence import Progress
from circuitkd.circuits.roles import head_roles
from circuitkd.compare.result import Comparison
from circuitkd.compare.robustness import robustness
from circuitkd.compare.swap import swap_test
from circuitkd.prompts import Prompts
from circuitkd.runs import Checkpoint
from circuitkd.tasks import Task


def with_details(
    result: Comparison,
    models: tuple[TransformerBridge, TransformerBridge],
    prompts: tuple[Prompts, Prompts],
    task: Task,
    *,
    batch_size: int | None,
    checkpoint: Checkpoint,
    progress: Progress | None,
) -> Comparison:
    """The comparison with ``roles``, ``swaps`` and the whole of ``robustness``."""
    config = result.config
    sides = dict(zip(("teacher", "student"), zip(models, prompts, strict=True), strict=True))
    roles = {
        side: head_roles(model, own, seed=config["seed"], batch_size=batch_size, progress=progress)
        for side, (model, own) in sides.items()
    }
    swaps = swap_test(
        *models, prompts, result, seed=config["seed"], batch_size=batch_size, progress=progress
    )
    perturbed = robustness(
        *models,
        task,
        n=config["n"],
        seed=config["seed"],
        variant=config["variant"],
        influences=result.influences,
        bos=config["bos"],
        batch_size=batch_size,
        checkpoint=checkpoint,
        progress=progress,
    )
    return replace(
        result,
        roles=roles,
        swaps=swaps,
        robustness=perturbed,
        warnings=tuple(dict.fromkeys((*result.warnings, *perturbed.warnings))),
    )
