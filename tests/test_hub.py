"""What the hub's failures are in words, one sentence each. No network: the errors are made here."""

from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest
from huggingface_hub import constants, errors

from circuitkd import _hub
from circuitkd._hub import fetch_from_hub, hub_state, why_not
from circuitkd.errors import ModelError


def refused(kind: type[errors.HfHubHTTPError], status: int, said: str = "no") -> Exception:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))
    return kind(f"{said}\n\nRequest ID: 1", response=response, server_message=said)


def wrapped(cause: Exception) -> Exception:
    error = errors.LocalEntryNotFoundError("not in the cache\nand more")
    error.__cause__ = cause
    return error


FAILURES = [
    (refused(errors.GatedRepoError, 401), r"is gated: accept its licence .* `hf auth login`"),
    (refused(errors.GatedRepoError, 403), "your account has no access"),
    (refused(errors.DisabledRepoError, 403), "has disabled 'some/model'"),
    (refused(errors.RepositoryNotFoundError, 404), "has no model 'some/model'"),
    (refused(errors.RevisionNotFoundError, 404), "no such revision: no"),
    (errors.RevisionResolutionError("abc is unknown."), "no such revision: abc is unknown"),
    (refused(errors.RemoteEntryNotFoundError, 404, "config.json?"), r"lacks a file: config\.json"),
    (errors.EntryNotFoundError("model.safetensors"), "lacks a file: model"),
    (errors.LocalEntryNotFoundError("not cached"), "cannot be reached"),
    (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
    (httpx.ConnectTimeout("slow"), "did not answer in time"),
    (httpx.ReadTimeout("slow"), "did not answer in time"),
    (httpx.ConnectError("refused"), "cannot be reached.*connect to the network"),
    (refused(errors.HfHubHTTPError, 429, "Too many requests."), "status 429: Too many requests; "),
    (refused(errors.BadRequestError, 400, "odd"), "status 400: odd"),
    (errors.FileMetadataError("no size"), "Downloading 'some/model' failed: no size"),
    (errors.XetDownloadError("cut off"), "Downloading 'some/model' failed: cut off"),
    (errors.HFValidationError("bad"), "neither a directory nor a hub id"),
    (OSError(28, "No space left on device"), "cannot be stored .* No space left"),
    (wrapped(httpx.ConnectTimeout("slow")), "did not answer in time"),
    (wrapped(refused(errors.GatedRepoError, 403)), "your account has no access"),
]


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(("error", "words"), FAILURES)
def test_every_failure_is_one_sentence_with_its_reason(error: Exception, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        raise ModelError(why_not("some/model", error))
    assert "\n" not in why_not("some/model", error)
    assert "Request ID" not in why_not("some/model", error)


@pytest.mark.parametrize("error", [error for error, _ in FAILURES])
@pytest.mark.parametrize("step", ["asking", "downloading"])
def test_every_failure_becomes_a_model_error_at_every_step(
    monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    class Found:
        siblings = (type("File", (), {"rfilename": "model.safetensors"}),)

    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(_hub, "_cached", lambda _name: None)
    monkeypatch.setattr(_hub, "snapshot_download", fail)
    asked: Callable[..., object] = fail if step == "asking" else lambda *_a, **_o: Found
    monkeypatch.setattr(_hub.HfApi, "model_info", asked)
    with pytest.raises(ModelError, match=r"some/model.*Or this\.$"):
        fetch_from_hub("some/model", "Or this.")


def test_a_fault_of_ours_is_not_taken_for_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> Path:
        raise TypeError("a bug")

    monkeypatch.setattr(_hub, "_cached", lambda _name: None)
    monkeypatch.setattr(_hub.HfApi, "model_info", fail)
    with pytest.raises(TypeError):
        fetch_from_hub("some/model", "")


def test_the_state_of_the_hub_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise httpx.ConnectError("nobody there")

    monkeypatch.setattr(_hub.httpx, "head", fail)
    answers, words = hub_state()
    assert not answers
    assert "nobody there" in words
    monkeypatch.setattr(_hub.httpx, "head", lambda *_a, **_o: httpx.Response(200))
    assert hub_state() == (True, f"{constants.ENDPOINT} answers (status 200)")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_state() == (False, "not asked: HF_HUB_OFFLINE is set")
