"""Models load from memory, directories and names; everything else is a clear, early error."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_models import random_gpt2, random_llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from circuitkd import load_model
from circuitkd.errors import ArchitectureError, InputError, ModelError
from circuitkd.models import (
    bundled_names,
    component_nodes_of,
    find_directory,
    model_label,
    tokenizer_of,
)

TOKENS = torch.arange(1, 9)[None]
ASK_THE_HUB = """
import time
from circuitkd import load_model
from circuitkd.errors import ModelError
start = time.monotonic()
try:
    load_model("gpt2-that-is-not-cached")
except ModelError as error:
    print(time.monotonic() - start, error)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    random_gpt2().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_a_model_in_memory_gives_its_own_logits_and_stays_usable(make, tmp_path: Path) -> None:
    network: PreTrainedModel = make()
    expected = network(TOKENS).logits
    bridge = load_model(network)
    torch.testing.assert_close(bridge(TOKENS), expected, atol=1e-5, rtol=0)
    assert not bridge.training
    network.save_pretrained(tmp_path)  # wrapping in place would make this fail
    torch.testing.assert_close(network(TOKENS).logits, expected, atol=0, rtol=0)


@pytest.mark.parametrize("make", [random_gpt2, random_llama])
def test_a_directory_gives_the_same_logits(make, tmp_path: Path) -> None:
    network = make()
    network.save_pretrained(tmp_path)
    bridge = load_model(tmp_path)
    torch.testing.assert_close(bridge(TOKENS), network(TOKENS).logits, atol=1e-5, rtol=0)
    assert model_label(bridge) == str(tmp_path)


def test_a_training_mode_model_is_analysed_in_evaluation_mode() -> None:
    network = random_gpt2()
    network.config.resid_pdrop = 0.5
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    network.train()
    bridge = load_model(network)
    assert torch.equal(bridge(TOKENS), bridge(TOKENS))
    assert network.training


def test_a_bridge_is_returned_as_it_is() -> None:
    bridge = load_model(random_gpt2())
    assert load_model(bridge) is bridge


def test_heads_are_query_heads_under_grouped_query_attention() -> None:
    bridge = load_model(random_llama(heads=4, kv_heads=2, layers=2))
    assert [n.name for n in component_nodes_of(bridge)][:6] == [
        "a0.h0", "a0.h1", "a0.h2", "a0.h3", "m0", "a1.h0",
    ]  # fmt: skip


def test_dtype_is_chosen_by_name(directory: Path) -> None:
    assert load_model(directory, dtype="bfloat16")(TOKENS).dtype == torch.bfloat16
    with pytest.raises(InputError, match="float32, bfloat16, float16"):
        load_model(directory, dtype="int8")


def test_the_bundled_pair_is_there() -> None:
    assert {"tiny-teacher", "tiny-student"} <= set(bundled_names())
    assert tokenizer_of(load_model("tiny-teacher")) is not None


def test_an_unknown_model_offline_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"cannot be reached.*local directory.*tiny-teacher"):
        load_model("no-such-model")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_path_that_is_not_there_does_not_ask_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="not a directory"):
        load_model(name)


def test_a_hub_that_never_answers_fails_within_ten_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        port = silent.getsockname()[1]
        hub = f"http://127.0.0.1:{port}"
        ran = subprocess.run(
            [sys.executable, "-c", ASK_THE_HUB],
            env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "cannot be reached" in ran.stdout, ran.stderr
    assert float(ran.stdout.split()[0]) < 10


def test_no_weights_is_an_error(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        load_model(directory)


def test_no_configuration_is_an_error(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(directory)


def test_pickled_weights_are_refused_with_the_reason(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="unpickling can run any code"):
        load_model(directory)


def test_nan_weights_are_refused(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.bias"][3] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN.*h\.1\.mlp\.c_fc\.bias"):
        load_model(directory)


def test_missing_tensors_are_refused(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.bias"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack 1 tensors"):
        load_model(directory)


def test_truncated_weights_are_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(directory)


def test_an_unsupported_architecture_is_refused_with_the_list() -> None:
    network = BloomForCausalLM(BloomConfig(n_layer=1, n_head=2, hidden_size=16, vocab_size=20))
    with pytest.raises(ArchitectureError, match=r"Bloom.*GPT2LMHeadModel.*LlamaForCausalLM"):
        load_model(network)


def test_a_task_needs_a_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"tokenizer=\.\.\."):
        tokenizer_of(load_model(random_gpt2()))


def test_processing_keeps_logit_differences() -> None:
    plain, processed = load_model(random_gpt2()), load_model(random_gpt2(), processed=True)
    change = processed(TOKENS) - plain(TOKENS)
    assert change.std(-1).max() < 1e-4
    weights = [model.blocks[0].ln1.original_component.weight for model in (plain, processed)]
    assert not torch.allclose(*weights)  # the gain was folded away


def test_the_tokenizer_stays_as_it_was_released() -> None:
    directory = find_directory("tiny-teacher")
    own = tokenizer_of(load_model(directory))
    assert (
        own("Mary gave").input_ids
        == AutoTokenizer.from_pretrained(directory)("Mary gave").input_ids
    )


def test_a_tokenizer_made_by_hand_is_taken_as_it_is() -> None:
    backend = Tokenizer(WordLevel({"<s>": 0, "Mary": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    assert tokenizer_of(load_model(random_gpt2(), tokenizer=made)) is made
