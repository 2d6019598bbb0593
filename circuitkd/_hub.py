"""Fetching a model from the Hugging Face hub: safetensors and configuration only, quick to fail."""

from pathlib import Path

import httpx2 as httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from circuitkd.errors import ModelError

_TIMEOUT_SECONDS = 5.0
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def fetch_from_hub(name: str, alternatives: str) -> Path:
    """The directory of hub model ``name``: the local cache where it is complete, else a download.

    Raises ``ModelError`` within seconds when the hub does not answer; ``alternatives`` ends that
    message.
    """
    cached = _cached(name)
    if cached is not None:
        return cached
    try:
        info = HfApi().model_info(name, timeout=_TIMEOUT_SECONDS)
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a directory nor a hub id. {alternatives}") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name!r} is gated: accept its licence on its hub page, then run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {name!r} (or it is private). {alternatives}"
        ) from error
    except (httpx.HTTPError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{name!r} is not a bundled model or a directory here, and the model hub cannot be "
            f"reached: connect to the network, or give a local directory. {alternatives}"
        ) from error
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if not any(file.endswith(".safetensors") for file in files):
        raise ModelError(
            f"{name!r} has no safetensors weights on the hub; pickled weights are not read, "
            "because unpickling can run any code."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"Downloading {name!r} failed: {error}. Try again; what came is kept."
        ) from error


def _cached(name: str) -> Path | None:
    try:
        directory = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    complete = (directory / "config.json").exists() and any(directory.glob("*.safetensors"))
    return directory if complete else None
