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
    from circuitkd.circuits._formats import read_graph, write_graph
    from circuitkd.circuits.attention import attention_patterns, ov_circuit, qk_circuit
    from circuitkd.circuits.attribution import EdgeScores, edge_attribution, node_attribution
    from circuitkd.circuits.circuit import Circuit
    from circuitkd.circuits.curves import faithfulness_curve, recovery
    from circuitkd.circuits.discovery import find_circuit
    from circuitkd.circuits.edge_pruning import edge_threshold_sweep, prune_edges
    from circuitkd.circuits.edges import Edge, Receiver
    from circuitkd.circuits.evaluation import CircuitReport, evaluate_circuit
    from circuitkd.circuits.hypothesis_tests import hypothesis_tests
    from circuitkd.circuits.influence import Influence, node_influence
    from circuitkd.circuits.patching import EdgeEffects, patched_run, path_patching
    from circuitkd.circuits.pruning import prune_nodes, threshold_sweep
    from circuitkd.circuits.roles import HeadRoles, head_roles
    from circuitkd.compare.alignment import paper_alignment, transport_alignment
    from circuitkd.compare.comparison import Comparison, compare, load_comparison
    from circuitkd.compare.lineage import lineage_accuracy
    from circuitkd.compare.residual_pca import residual_pca
    from circuitkd.compare.robustness import Robustness, load_robustness, robustness
    from circuitkd.compare.similarity import similarity
    from circuitkd.compare.swap import SwapTest, swap_test
    from circuitkd.errors import CircuitKDError
    from circuitkd.models import load_model
    from circuitkd.nodes import Node
    from circuitkd.prompts import PromptGroup, Prompts
    from circuitkd.recorded.reproduction import Reproduction, reproduce
    from circuitkd.tasks import Task, load_task, task_names

_HOME_OF = {
    "Circuit": "circuitkd.circuits.circuit",
    "CircuitKDError": "circuitkd.errors",
    "CircuitReport": "circuitkd.circuits.evaluation",
    "Comparison": "circuitkd.compare.comparison",
    "Edge": "circuitkd.circuits.edges",
    "EdgeEffects": "circuitkd.circuits.patching",
    "EdgeScores": "circuitkd.circuits.attribution",
    "HeadRoles": "circuitkd.circuits.roles",
    "Influence": "circuitkd.circuits.influence",
    "Node": "circuitkd.nodes",
    "PromptGroup": "circuitkd.prompts",
    "Prompts": "circuitkd.prompts",
    "Receiver": "circuitkd.circuits.edges",
    "Reproduction": "circuitkd.recorded.reproduction",
    "Robustness": "circuitkd.compare.robustness",
    "SwapTest": "circuitkd.compare.swap",
    "Task": "circuitkd.tasks",
    "attention_patterns": "circuitkd.circuits.attention",
    "edge_attribution": "circuitkd.circuits.attribution",
    "edge_threshold_sweep": "circuitkd.circuits.edge_pruning",
    "evaluate_circuit": "circuitkd.circuits.evaluation",
    "faithfulness_curve": "circuitkd.circuits.curves",
    "find_circuit": "circuitkd.circuits.discovery",
    "head_roles": "circuitkd.circuits.roles",
    "hypothesis_tests": "circuitkd.circuits.hypothesis_tests",
    "lineage_accuracy": "circuitkd.compare.lineage",
    "load_comparison": "circuitkd.compare.comparison",
    "load_model": "circuitkd.models",
    "load_robustness": "circuitkd.compare.robustness",
    "load_task": "circuitkd.tasks",
    "node_attribution": "circuitkd.circuits.attribution",
    "node_influence": "circuitkd.circuits.influence",
    "ov_circuit": "circuitkd.circuits.attention",
    "paper_alignment": "circuitkd.compare.alignment",
    "patched_run": "circuitkd.circuits.patching",
    "path_patching": "circuitkd.circuits.patching",
    "prune_edges": "circuitkd.circuits.edge_pruning",
    "prune_nodes": "circuitkd.circuits.pruning",
    "qk_circuit": "circuitkd.circuits.attention",
    "read_graph": "circuitkd.circuits._formats",
    "recovery": "circuitkd.circuits.curves",
    "reproduce": "circuitkd.recorded.reproduction",
    "residual_pca": "circuitkd.compare.residual_pca",
    "robustness": "circuitkd.compare.robustness",
    "similarity": "circuitkd.compare.similarity",
    "swap_test": "circuitkd.compare.swap",
    "task_names": "circuitkd.tasks",
    "threshold_sweep": "circuitkd.circuits.pruning",
    "transport_alignment": "circuitkd.compare.alignment",
    "write_graph": "circuitkd.circuits._formats",
}

__all__ = [
    "Circuit",
    "CircuitKDError",
    "CircuitReport",
    "Comparison",
    "Edge",
    "EdgeEffects",
    "EdgeScores",
    "HeadRoles",
    "Influence",
    "Node",
    "PromptGroup",
    "Prompts",
    "Receiver",
    "Reproduction",
    "Robustness",
    "SwapTest",
    "Task",
    "__version__",
    "attention_patterns",
    "compare",
    "edge_attribution",
    "edge_threshold_sweep",
    "evaluate_circuit",
    "faithfulness_curve",
    "find_circuit",
    "head_roles",
    "hypothesis_tests",
    "lineage_accuracy",
    "load_comparison",
    "load_model",
    "load_robustness",
    "load_task",
    "node_attribution",
    "node_influence",
    "ov_circuit",
    "paper_alignment",
    "patched_run",
    "path_patching",
    "prune_edges",
    "prune_nodes",
    "qk_circuit",
    "read_graph",
    "recovery",
    "reproduce",
    "residual_pca",
    "robustness",
    "similarity",
    "swap_test",
    "task_names",
    "threshold_sweep",
    "transport_alignment",
    "write_graph",
]


def __getattr__(name: str) -> object:
    if name == "compare":  # the package, which is callable: see its docstring
        return import_module("circuitkd.compare")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
