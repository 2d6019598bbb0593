"""``circuitkd models``, ``doctor``, ``tasks`` and ``tasks show``."""

import numpy as np
import typer

from circuitkd import _printing_tasks, printing
from circuitkd._cli_support import import_libraries, quiet_libraries, results
from circuitkd.tasks import load_task, task_names


def list_models() -> None:
    """Print the bundled models and how to name others."""
    with quiet_libraries():
        import_libraries()
        from transformers import AutoConfig
    from circuitkd.models import BUNDLED_DIRECTORY, FAMILIES, bundled_names

    configs = {
        name: AutoConfig.from_pretrained(BUNDLED_DIRECTORY / name) for name in bundled_names()
    }
    families = [(family.name, family.examples) for family in FAMILIES]
    results().print(printing.models_view(configs, families))


def print_diagnosis() -> None:
    """Print what is here and what would run; exit code 1 when something needed is broken."""
    with quiet_libraries():
        import_libraries()
        from circuitkd._doctor import diagnose
        from circuitkd._printing_doctor import diagnosis_view

        diagnosis = diagnose()
    results().print(diagnosis_view(diagnosis))
    if diagnosis.broken:
        raise typer.Exit(1)


def list_tasks() -> None:
    """Print the shipped tasks."""
    results().print(_printing_tasks.tasks_view([load_task(name) for name in task_names()]))


def show_task(
    name: str, *, model: str | None, variant: str | None, n: int, seed: int, bos: str
) -> None:
    """Print ``n`` samples of a task: as text, or as the tokens that ``model`` reads."""
    task = load_task(name)
    if model is None:
        rng = np.random.default_rng(seed)
        drawn = [task.draw(rng, variant=variant) for _ in range(n)]
        results().print(_printing_tasks.text_samples_view(task, drawn))
        return
    task.with_variant(variant)
    with quiet_libraries():
        import_libraries()
        from circuitkd.models import load_model, tokenizer_of

        loaded = load_model(model)
        prompts = task.sample(loaded, n, seed, variant=variant, bos=bos)
        tokenizer = tokenizer_of(loaded)
    view = _printing_tasks.token_samples_view(
        task, prompts, lambda token: str(tokenizer.decode([token]))
    )
    results().print(view)
