"""Fault 18: local models could not be loaded without a network."""

import socket
from pathlib import Path

import pytest
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from circuitkd import compare, load_model, load_task


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not offline by setting, which would hide an attempt: any attempt to connect fails."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("something asked for the network")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_directories_bundled_names_and_models_in_memory_need_none(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", tasks=("weekdays",))
    in_memory = load_model(
        AutoModelForCausalLM.from_pretrained(directory),
        tokenizer=AutoTokenizer.from_pretrained(directory),
    )
    task = load_task("weekdays")
    task = task.model_copy(update={"templates": task.templates[:1]})
    result = compare(directory, in_memory, task, n=8, draws=0, null_draws=0)
    assert result.alignment.value == pytest.approx(1, abs=1e-6)
    assert load_model("tiny-student").cfg.n_layers == 2


@pytest.mark.usefixtures("no_network")
def test_the_fixture_sees_an_attempt() -> None:
    with pytest.raises(AssertionError, match="asked for the network"):
        load_model("no-such-model")
