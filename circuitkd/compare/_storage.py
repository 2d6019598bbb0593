"""A comparison on disk: comparison.json (texts and single numbers) and comparison.safetensors.

Beside them lie the files of its parts: robustness.*, and where details were measured
swaps.safetensors and roles_*.safetensors. The JSON file of the comparison is written last, names
the schema and says which parts there are; without it there is no comparison.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from circuitkd.circuits._role_result import HeadRoles
from circuitkd.circuits.influence_result import Influence
from circuitkd.compare._robustness_result import load_robustness
from circuitkd.compare._swap_result import SwapTest
from circuitkd.compare.alignment import Alignment
from circuitkd.compare.evidence import Null, Reference
from circuitkd.errors import InputError
from circuitkd.nodes import Node
from circuitkd.runs import write_atomically

if TYPE_CHECKING:
    from circuitkd.compare.result import Comparison

SCHEMA = "circuitkd.comparison/2"
_TEXTS, _NUMBERS = "comparison.json", "comparison.safetensors"
_SWAPS, _ROLES = "swaps.safetensors", "roles_{side}.safetensors"
_TABLES = ("similarity", "similarity_low", "similarity_high", "paper_similarity", "plan")
_ABOUT_INFLUENCE = ("model", "task", "variant", "bos", "ablation", "metric")


def save(result: "Comparison", directory: Path) -> None:
    """Write all files."""
    influences = result.influences
    texts = {
        "schema": SCHEMA,
        "alignments": {name: asdict(value) for name, value in result.alignments.items()},
        "chance_similarity": result.chance_similarity,
        "influences": {side: _about(influence) for side, influence in influences.items()},
        "warnings": list(result.warnings),
        "config": dict(result.config),
        "versions": dict(result.versions),
        "swaps": result.swaps is not None,
        "roles": list(result.roles or ()),
    }
    tensors: dict[str, Tensor] = {}
    for side, influence in influences.items():
        tensors[f"{side}.effects"] = influence.effects.contiguous()
        tensors[f"{side}.clean"] = influence.clean.contiguous()
    for name in _TABLES:
        if (table := getattr(result, name)) is not None:
            tensors[name] = torch.tensor(table.to_numpy()).contiguous()
    write_atomically(directory / _NUMBERS, to_bytes(tensors))
    replace(result.robustness, influences=None).save(directory)
    if result.swaps is not None:
        result.swaps.save(directory / _SWAPS)
    for side, roles in (result.roles or {}).items():
        roles.save(directory / _ROLES.format(side=side))
    write_atomically(directory / _TEXTS, (json.dumps(texts, indent=2) + "\n").encode())


def load_fields(directory: Path) -> dict[str, Any]:
    """The arguments of `Comparison` from both files."""
    texts, tensors = _read(directory)
    influences = {
        side: Influence(
            **{name: about[name] for name in _ABOUT_INFLUENCE},
            nodes=tuple(Node.parse(name) for name in about["nodes"]),
            effects=tensors[f"{side}.effects"],
            clean=tensors[f"{side}.clean"],
        )
        for side, about in texts["influences"].items()
    }
    names = {
        side: [node.name for node in influence.nodes] for side, influence in influences.items()
    }
    tables = {
        name: pd.DataFrame(tensors[name].numpy(), index=names["teacher"], columns=names["student"])
        if name in tensors
        else None
        for name in _TABLES
    }
    roles = {side: HeadRoles.load(directory / _ROLES.format(side=side)) for side in texts["roles"]}
    return {
        "robustness": replace(load_robustness(directory), influences=influences),
        "swaps": SwapTest.load(directory / _SWAPS) if texts["swaps"] else None,
        "roles": roles or None,
        "alignments": {name: _alignment(about) for name, about in texts["alignments"].items()},
        "chance_similarity": texts["chance_similarity"],
        "influences": influences,
        "warnings": tuple(texts["warnings"]),
        "config": texts["config"],
        "versions": texts["versions"],
        **tables,
    }


def _alignment(about: dict[str, Any]) -> Alignment:
    null, ceiling, floor = (about.pop(name) for name in ("null", "ceiling", "floor"))
    return Alignment(
        **about,
        null=Null(**null) if null else None,
        ceiling=Reference(**ceiling) if ceiling else None,
        floor=Reference(**floor) if floor else None,
    )


def _about(influence: Influence) -> dict[str, Any]:
    about = {name: getattr(influence, name) for name in _ABOUT_INFLUENCE}
    return {**about, "nodes": [node.name for node in influence.nodes]}


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        texts = json.loads((directory / _TEXTS).read_text())
        if not isinstance(texts, dict) or texts.get("schema") != SCHEMA:
            raise InputError(f"{directory / _TEXTS} is not a comparison that circuitkd can read.")
        return texts, load((directory / _NUMBERS).read_bytes())
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise InputError(
            f"There is no complete comparison in {directory}: {error}. Give the directory that "
            "Comparison.save or `circuitkd score --out` wrote."
        ) from error
