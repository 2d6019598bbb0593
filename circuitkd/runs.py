"""Run directories: what a long computation leaves on disk, so that it can stop and go on.

A run directory holds ``config.json`` (the arguments that define the run, their hash, the versions
it was made with), ``parts/`` (finished pieces of the computation, as safetensors) and whatever the
run writes as its result. Every file appears under its name only when it is complete (temporary
file, fsync, rename), so a run that was killed at any moment continues from its last whole part.

Code that computes does not know about directories. It takes a ``Checkpoint`` and asks it:

>>> import torch
>>> def squares(n, checkpoint=NO_CHECKPOINT):
...     if (found := checkpoint.get("squares")) is None:
...         found = {"values": torch.arange(n) ** 2}
...         checkpoint.put("squares", found)
...     return found["values"]
>>> memory = MemoryCheckpoint()
>>> squares(4, memory).tolist(), list(memory.parts)
([0, 1, 4, 9], ['squares'])
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from circuitkd import __version__
from circuitkd.errors import RunDirectoryError, RunError

SCHEMA = "circuitkd.run/1"

_CONFIG = "config.json"
_PARTS = "parts"
_LOCK = ".circuitkd.lock"
_TEMPORARY = ".circuitkd-tmp-"


@runtime_checkable
class Checkpoint(Protocol):
    """Where a computation keeps its finished pieces. A key names a piece within one run."""

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors put under ``key`` in this run, on the CPU; None when there are none."""
        ...

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors`` under ``key``; an earlier piece of that name is replaced."""
        ...


class NoCheckpoint:
    """Keeps nothing: every piece is computed."""

    def get(self, key: str) -> dict[str, Tensor] | None:
        return None

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        pass


NO_CHECKPOINT = NoCheckpoint()


@dataclass(frozen=True)
class MemoryCheckpoint:
    """Keeps pieces for as long as it lives."""

    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def get(self, key: str) -> dict[str, Tensor] | None:
        return self.parts.get(key)

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self.parts[key] = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class ScopedCheckpoint:
    """A checkpoint's pieces whose key starts with ``prefix``, under the rest of their key.

    >>> memory = MemoryCheckpoint()
    >>> ScopedCheckpoint(memory, "teacher/").put("influence", {})
    >>> list(memory.parts)
    ['teacher/influence']
    """

    inner: Checkpoint
    prefix: str

    def get(self, key: str) -> dict[str, Tensor] | None:
        return self.inner.get(self.prefix + key)

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self.inner.put(self.prefix + key, tensors)


@dataclass(frozen=True)
class RunDirectory:
    """A directory that belongs to one run: a checkpoint on disk, and a place for results.

    Made by ``RunDirectory.open``; holds a lock until ``close`` (or the end of a ``with`` block, or
    of the process, however that ends). It does not promise that parts written by other versions
    of circuitkd or torch can be continued: those are refused like other arguments.
    """

    path: Path
    arguments: Mapping[str, Any]
    run_hash: str
    resumed: bool
    lock: FileLock = field(repr=False)

    @classmethod
    def open(cls, path: str | Path, arguments: Mapping[str, Any]) -> "RunDirectory":
        """Start a run in ``path``, or continue the one with the same ``arguments`` there.

        ``arguments`` must be plain data (what JSON can hold) and say everything the results depend
        on. Raises ``RunDirectoryError`` when the directory cannot be written, holds something
        else, belongs to a run with other arguments or versions (it names what differs), or is in
        use by another process.

        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "run"
        >>> with RunDirectory.open(folder, {"n": 100}) as run:
        ...     run.put("part", {"x": torch.ones(2)})
        >>> with RunDirectory.open(folder, {"n": 100}) as run:
        ...     run.resumed, run.get("part")
        (True, {'x': tensor([1., 1.])})
        >>> RunDirectory.open(folder, {"n": 50})
        Traceback (most recent call last):
        circuitkd.errors.RunDirectoryError: ... n was 100, now 50. ...
        """
        path = Path(path)
        arguments = json.loads(json.dumps(arguments, sort_keys=True))
        check_run_directory(path)
        lock = _locked(path)
        try:
            resumed = _begin_or_continue(path, arguments)
        except BaseException:
            lock.release()
            raise
        return cls(path, arguments, hash_of(arguments), resumed, lock)

    def close(self) -> None:
        """Let another process use the directory."""
        self.lock.release()

    def discard(self) -> None:
        """Undo a run that turned out to be impossible; does nothing once there is work to keep.

        Without this, a mistyped argument would claim the directory for good.
        """
        if not self.resumed and not (self.path / _PARTS).exists():
            (self.path / _CONFIG).unlink(missing_ok=True)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors put under ``key``; None when absent, damaged, or of another run."""
        try:
            with safe_open(self.path / _part(key), framework="pt") as part:
                tensors = {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118
                labels = part.metadata() or {}
        except (OSError, SafetensorError):
            return None
        return tensors if labels == self._labels(key, tensors) else None

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors`` under ``key``; raises ``RunError`` when the disk refuses them."""
        plain = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        plain = {name: tensor.contiguous() for name, tensor in plain.items()}
        self.write_bytes(_part(key), save(plain, metadata=self._labels(key, plain)))

    def write_bytes(self, name: str | Path, content: bytes) -> None:
        """Write the file ``name``, a path within the run; it appears whole or not at all."""
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            raise RunError(
                f"{self.path / name} could not be written ({_reason(error)}). What was finished is "
                "kept: remove the cause and call again with the same arguments to continue."
            ) from error

    def write_text(self, name: str | Path, content: str) -> None:
        """Write the text file ``name``, a path within the run; it appears whole or not at all."""
        self.write_bytes(name, content.encode())

    def _labels(self, key: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return {"key": key, "run": self.run_hash, "digest": _digest(tensors)}


def check_run_directory(path: str | Path) -> None:
    """Raise ``RunDirectoryError`` unless ``path`` can be written and is a run's, empty or new.

    Creates the directory, and leaves nothing else behind.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file: choose a new or empty directory.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"{_TEMPORARY}probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        foreign = sorted(entry.name for entry in path.iterdir() if not _is_ours(entry.name))
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written ({_reason(error)}): choose another directory."
        ) from error
    if foreign and not (path / _CONFIG).is_file():
        raise RunDirectoryError(
            f"{path} holds files that are not from a circuitkd run ({foreign[0]}, …): choose a new "
            "or empty directory."
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``: all of it or, after a crash, none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{path.name}"
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def hash_of(arguments: Mapping[str, Any]) -> str:
    """A short hash of plain data; the order of keys does not matter.

    >>> hash_of({"n": 1, "seed": 0}) == hash_of({"seed": 0, "n": 1})
    True
    """
    text = json.dumps(arguments, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def file_name_of(key: str) -> str:
    """A file name for a part: readable, safe on every file system, and different for every key.

    >>> file_name_of("teacher/influence/group 0")
    'teacher-influence-group-0-c1288501.safetensors'
    """
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", key)[:80]
    unique = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
    return f"{readable}-{unique}.safetensors"


def versions() -> dict[str, str]:
    """What results depend on beside their arguments: versions, and the kind of platform.

    >>> sorted(versions())
    ['circuitkd', 'numpy', 'platform', 'python', 'torch', 'transformer-lens', 'transformers']
    """
    packages = ("numpy", "torch", "transformer-lens", "transformers")
    return {
        "circuitkd": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{package: metadata.version(package) for package in packages},
    }


def fingerprint(path: str | Path, blocks: int = 64, block_size: int = 1 << 16) -> str:
    """A hash of a file, or of a directory's weights and JSON files, that any retraining changes.

    Of each file it reads the size and up to ``blocks`` evenly spaced blocks: enough to notice other
    weights, and fast for files of many gigabytes.
    """
    path = Path(path)
    files = (
        [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    )
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for start in sorted({size * i // blocks for i in range(blocks)}):
                content.seek(min(start, max(size - block_size, 0)))
                digest.update(content.read(block_size))
    return digest.hexdigest()


def _part(key: str) -> Path:
    return Path(_PARTS) / file_name_of(key)


def _locked(path: Path) -> FileLock:
    # The operating system drops this lock with the process, so a killed run leaves nothing stale.
    lock = FileLock(path / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunDirectoryError(
            f"Another process is working in {path}: wait until it ends, or choose another one."
        ) from error
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be locked ({_reason(error)}).") from error
    return lock


def _begin_or_continue(path: Path, arguments: Mapping[str, Any]) -> bool:
    """Write config.json, or check the one that is there; returns whether there was one."""
    for leftover in (*path.glob(f"{_TEMPORARY}*"), *(path / _PARTS).glob(f"{_TEMPORARY}*")):
        leftover.unlink(missing_ok=True)
    now = {"arguments": arguments, "versions": versions()}
    if not (path / _CONFIG).exists():
        config = {"schema": SCHEMA, "hash": hash_of(arguments), **now}
        write_atomically(path / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        return False
    found = _read_config(path)
    for what in ("arguments", "versions"):
        if differences := _differences(found.get(what) or {}, now[what]):
            raise RunDirectoryError(
                f"{path} belongs to a run with other {what}: {'; '.join(differences)}. "
                "Choose another directory, or delete this one to start anew."
            )
    return True


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path / _CONFIG} cannot be read: choose another directory, or delete this one."
        ) from error
    if not isinstance(config, dict) or config.get("schema") != SCHEMA:
        raise RunDirectoryError(
            f"{path / _CONFIG} is not from a circuitkd run: choose a new or empty directory."
        )
    return config


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs, in words, with dotted names for nested values."""
    found = []
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += _differences(was, now, f"{prefix}{name}.")
        elif was != now:
            found.append(f"{prefix}{name} was {was}, now {now}")
    return found


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_ours(name: str) -> bool:
    return name == _LOCK or name.startswith(_TEMPORARY)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _sync_directory(path: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened, and a rename is durable enough
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
