"""circuitkd: does a distilled student solve a task with its teacher's circuit?

Names are imported when they are first used (PEP 562), so that ``import circuitkd`` and
``circuitkd --help`` do not wait for torch.

>>> import circuitkd as ckd
>>> "compare" in dir(ckd)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from circuitkd.circuits.influence import Influence, node_influence
    from circuitkd.compare.alignment import paper_alignment, transport_alignment
    from circuitkd.compare.comparison import Comparison, compare, load_comparison
    from circuitkd.compare.similarity import similarity
    from circuitkd.errors import CircuitKDError
    from circuitkd.models import load_model
    from circuitkd.nodes import Node
    from circuitkd.prompts import PromptGroup, Prompts
    from circuitkd.tasks import Task, load_task, task_names

_HOME_OF = {
    "CircuitKDError": "circuitkd.errors",
    "Comparison": "circuitkd.compare.comparison",
    "Influence": "circuitkd.circuits.influence",
    "Node": "circuitkd.nodes",
    "PromptGroup": "circuitkd.prompts",
    "Prompts": "circuitkd.prompts",
    "Task": "circuitkd.tasks",
    "load_comparison": "circuitkd.compare.comparison",
    "load_model": "circuitkd.models",
    "load_task": "circuitkd.tasks",
    "node_influence": "circuitkd.circuits.influence",
    "paper_alignment": "circuitkd.compare.alignment",
    "similarity": "circuitkd.compare.similarity",
    "task_names": "circuitkd.tasks",
    "transport_alignment": "circuitkd.compare.alignment",
}

__all__ = [
    "CircuitKDError",
    "Comparison",
    "Influence",
    "Node",
    "PromptGroup",
    "Prompts",
    "Task",
    "__version__",
    "compare",
    "load_comparison",
    "load_model",
    "load_task",
    "node_influence",
    "paper_alignment",
    "similarity",
    "task_names",
    "transport_alignment",
]


def __getattr__(name: str) -> object:
    if name == "compare":  # the package, which is callable: see its docstring
        return import_module("circuitkd.compare")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
