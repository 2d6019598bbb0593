"""``circuitkd doctor``: what is here, and what would run with it."""

import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from circuitkd import __version__, _smollm2
from circuitkd._cache import cache_directory
from circuitkd._hub import hub_state
from circuitkd._pairs import HUB_PAIRS
from circuitkd.errors import ModelError
from circuitkd.models import bundled_names, load_model

_PACKAGES = (
    "torch", "transformers", "transformer-lens", "huggingface-hub", "safetensors", "tokenizers",
    "numpy", "pandas", "scipy", "scikit-learn", "POT",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        about: what was looked at.
        state: ``"ok"``; ``"note"``: something optional is not there; ``"broken"``: circuitkd
            cannot do its work without it.
        found: what was found, and what to do about it.
    """

    about: str
    state: str
    found: str


@dataclass(frozen=True)
class Diagnosis:
    """All checks by topic, and the pairs that were looked at: (label, GB needed, where it fits)."""

    topics: dict[str, tuple[Check, ...]]
    pairs: tuple[tuple[str, float, str], ...]

    @property
    def broken(self) -> tuple[Check, ...]:
        """What must be repaired."""
        every = (check for checks in self.topics.values() for check in checks)
        return tuple(check for check in every if check.state == "broken")


def diagnose(*, timeout: float = 3.0) -> Diagnosis:
    """Look at everything; never waits longer than ``timeout`` for the hub, and never raises."""
    memory = memory_by_device()
    others = [_accelerator(name, free) for name, free in memory.items() if name != "cpu"]
    return Diagnosis(
        {
            "versions": tuple(versions(_PACKAGES)),
            "devices": (_processor(), *others),
            "memory and disk": (_free_memory(memory["cpu"]), _free_disk(cache_directory())),
            "models": (_hub(timeout), *map(_bundled, bundled_names() or ("bundled",)), _smollm2_()),
        },
        tuple(
            (f"{pair.teacher} / {pair.student}, {pair.dtype}", pair.bytes_needed / 1e9, fit)
            for pair in HUB_PAIRS
            for fit in [where_it_fits(pair.bytes_needed, memory)]
        ),
    )


def versions(packages: Iterable[str]) -> list[Check]:
    """Python, circuitkd, and what it stands on; a package that is not there is broken."""
    checks = [
        Check("Python", "ok", f"{platform.python_version()} on {platform.system()}"),
        Check("circuitkd", "ok", __version__),
    ]
    for package in packages:
        try:
            checks.append(Check(package, "ok", metadata.version(package)))
        except metadata.PackageNotFoundError:
            checks.append(Check(package, "broken", "missing: run pip install circuitkd again"))
    return checks


def memory_by_device() -> dict[str, int]:
    """Free bytes of every device that torch can use; MPS shares the memory of the CPU."""
    free = {"cpu": psutil.virtual_memory().available}
    for index in range(torch.cuda.device_count()):
        free[f"cuda:{index}"] = torch.cuda.mem_get_info(index)[0]
    if torch.backends.mps.is_available():
        free["mps"] = free["cpu"]
    return free


def where_it_fits(needed: int, memory: dict[str, int]) -> str:
    """The devices with that much free memory, or "nowhere here".

    >>> where_it_fits(3, {"cpu": 2, "cuda:0": 8})
    'cuda:0'
    >>> where_it_fits(9, {"cpu": 2, "cuda:0": 8})
    'nowhere here'
    """
    return ", ".join(name for name, free in memory.items() if free >= needed) or "nowhere here"


def _processor() -> Check:
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    return Check("cpu", "ok", f"{cores} cores; torch uses {threads} threads (--threads)")


def _accelerator(name: str, free: int) -> Check:
    kind = torch.cuda.get_device_name(name) if name.startswith("cuda") else "Apple GPU"
    return Check(name, "ok", f"{kind}, {free / 1e9:.1f} GB free (--device {name})")


def _free_memory(free: int) -> Check:
    enough = free > 1e9
    advice = "" if enough else ": even the bundled models need 1 GB; close something"
    return Check("memory", "ok" if enough else "broken", f"{free / 1e9:.1f} GB free{advice}")


def _free_disk(cache: Path) -> Check:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = f"{shutil.disk_usage(there).free / 1e9:.1f} GB free for {cache}"
    if os.access(there, os.W_OK):
        return Check("cache", "ok", free)
    return Check("cache", "note", f"{cache} cannot be written: set CIRCUITKD_CACHE")


def _hub(timeout: float) -> Check:
    answers, words = hub_state(timeout)
    advice = "" if answers else ". Installed, cached and local models work without it"
    return Check("model hub", "ok" if answers else "note", words + advice)


def _bundled(name: str) -> Check:
    try:
        model = load_model(name)
    except ModelError as error:
        return Check(name, "broken", str(error))
    return Check(name, "ok", f"bundled: {model.cfg.n_layers} layers × {model.cfg.n_heads} heads")


def _smollm2_() -> Check:
    if _smollm2.is_cached():
        return Check(_smollm2.SMOLLM2, "ok", f"unpacked in {_smollm2.cached_directory()}")
    if _smollm2.is_installed():
        return Check(_smollm2.SMOLLM2, "ok", "installed; unpacked (540 MB) when first loaded")
    return Check(_smollm2.SMOLLM2, "note", "not installed: pip install 'circuitkd[smollm2]'")
