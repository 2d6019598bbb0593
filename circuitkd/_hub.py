"""Fetching a model from the Hugging Face hub: safetensors and configuration only, quick to fail."""

from pathlib import Path

import httpx2 as httpx
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)

from circuitkd.errors import ModelError

_TIMEOUT_SECONDS = 5.0
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
# What the hub's client raises on purpose; OSError is a full disk, or a cache that is not writable.
_FAILURES = (
    httpx.HTTPError,
    HFValidationError,
    EntryNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
    OSError,
)


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
    except _FAILURES as error:
        raise ModelError(why_not(name, error, alternatives)) from error
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if not any(file.endswith(".safetensors") for file in files):
        raise ModelError(
            f"{name!r} has no safetensors weights on the hub; pickled weights are not read, "
            "because unpickling can run any code."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except _FAILURES as error:
        raise ModelError(why_not(name, error, alternatives)) from error


def why_not(name: str, error: Exception, alternatives: str = "") -> str:
    """Why model ``name`` did not come from the hub, and what to do; ``alternatives`` comes last.

    >>> why_not("gpt2", OfflineModeIsEnabled("offline"))
    "The model hub cannot be reached, so 'gpt2' cannot be fetched: HF_HUB_OFFLINE is set; unset it,
    or give a local directory."
    """
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client wraps what went wrong on the way
    return f"{_sentence(name, error)} {alternatives}".rstrip()


def _sentence(name: str, error: Exception) -> str:
    match error:
        case HFValidationError():
            return f"{name!r} is neither a directory nor a hub id."
        case GatedRepoError() if error.response.status_code == httpx.codes.FORBIDDEN:
            return (
                f"{name!r} is gated, and your account has no access to it: ask for access on its "
                "hub page, and wait until it is granted."
            )
        case GatedRepoError():
            return (
                f"{name!r} is gated: accept its licence on its hub page, then run `hf auth login`."
            )
        case DisabledRepoError():
            return f"The hub has disabled {name!r}; nobody can fetch it."
        case RepositoryNotFoundError():
            return f"The hub has no model {name!r} (or it is private)."
        case RevisionNotFoundError() | RevisionResolutionError():
            return f"The hub's {name!r} has no such revision: {_first_line(error)}."
        case LocalEntryNotFoundError() | OfflineModeIsEnabled() | httpx.TransportError():
            return _unreachable(name, error)
        case EntryNotFoundError():
            return f"The hub's {name!r} lacks a file: {_first_line(error)}."
        case HfHubHTTPError():
            return (
                f"The hub refused {name!r} with status {error.response.status_code}: "
                f"{(error.server_message or _first_line(error)).rstrip('.')}; try again later."
            )
        case FileMetadataError() | XetDownloadError():
            return (
                f"Downloading {name!r} failed: {_first_line(error)}. Try again; what came is kept."
            )
        case _:
            return f"{name!r} cannot be stored in the hub's cache: {_first_line(error)}."


def _unreachable(name: str, error: Exception) -> str:
    advice = "connect to the network"
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set; unset it"
    elif isinstance(error, httpx.TimeoutException):
        advice = "it did not answer in time; try again later"
    return (
        f"The model hub cannot be reached, so {name!r} cannot be fetched: {advice}, or give a "
        "local directory."
    )


def hub_state(timeout: float = 3.0) -> tuple[bool, str]:
    """Whether the hub answers, and what it or the network said."""
    if constants.HF_HUB_OFFLINE:
        return False, "not asked: HF_HUB_OFFLINE is set"
    try:
        response = httpx.head(constants.ENDPOINT, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return False, f"{constants.ENDPOINT} does not answer: {_first_line(error)}"
    return True, f"{constants.ENDPOINT} answers (status {response.status_code})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _cached(name: str) -> Path | None:
    try:
        directory = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    complete = (directory / "config.json").exists() and any(directory.glob("*.safetensors"))
    return directory if complete else None
