"""Run directories: nothing half-written is believed, nothing foreign is touched."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from circuitkd import runs
from circuitkd.errors import RunDirectoryError, RunError
from circuitkd.runs import MemoryCheckpoint, NoCheckpoint, RunDirectory, ScopedCheckpoint

ARGUMENTS = {"teacher": "a", "n": 100, "seed": 0}


def part_files(folder: Path) -> list[Path]:
    return sorted((folder / "parts").iterdir())


def test_a_part_comes_back_as_it_was_put(tmp_path):
    tensors = {
        "float": torch.randn(3, 2),
        "half": torch.randn(4).to(torch.bfloat16),
        "ids": torch.arange(5),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 7),
        "view": torch.randn(4, 6).T[1:],
    }
    with RunDirectory.open(tmp_path / "run", ARGUMENTS) as run:
        run.put("x/y", tensors)
    with RunDirectory.open(tmp_path / "run", ARGUMENTS) as run:
        found = run.get("x/y")
    assert found is not None
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_relative_directory_holds_its_parts_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory.open("runs/demo", ARGUMENTS) as run:
        run.put("key", {"x": torch.ones(1)})
        assert run.get("key") is not None
    found = {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
    assert found - {".circuitkd.lock"} == {"config.json", "parts"}


def test_two_names_of_one_memory_can_be_put(tmp_path):
    tensor = torch.randn(3)
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        run.put("key", {"one": tensor, "two": tensor})
        assert set(run.get("key") or {}) == {"one", "two"}


def test_a_part_that_was_never_put_is_none(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        assert run.get("key") is None


def test_keys_that_look_alike_are_kept_apart(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        run.put("a/b", {"x": torch.zeros(1)})
        run.put("a-b", {"x": torch.ones(1)})
        assert (run.get("a/b") or {})["x"].item() == 0


def test_a_later_part_replaces_an_earlier_one(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        run.put("key", {"x": torch.zeros(1)})
        run.put("key", {"x": torch.ones(1)})
        assert (run.get("key") or {})["x"].item() == 1
        assert len(part_files(tmp_path)) == 1


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_part_counts_as_absent(tmp_path, keep):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        run.put("key", {"x": torch.randn(50)})
        [file] = part_files(tmp_path)
        file.write_bytes(file.read_bytes()[:keep])
        assert run.get("key") is None


def test_a_part_with_one_wrong_bit_counts_as_absent(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        run.put("key", {"x": torch.randn(50)})
        [file] = part_files(tmp_path)
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        assert run.get("key") is None


def test_a_part_of_another_run_counts_as_absent(tmp_path):
    with RunDirectory.open(tmp_path / "one", ARGUMENTS) as run:
        run.put("key", {"x": torch.ones(1)})
    with RunDirectory.open(tmp_path / "two", {**ARGUMENTS, "seed": 1}) as run:
        run.put("key", {"x": torch.zeros(1)})
        [there], [here] = part_files(tmp_path / "one"), part_files(tmp_path / "two")
        here.write_bytes(there.read_bytes())
        assert run.get("key") is None


def test_the_same_arguments_continue_and_others_are_refused_by_name(tmp_path):
    RunDirectory.open(tmp_path, ARGUMENTS).close()
    with RunDirectory.open(tmp_path, dict(reversed(ARGUMENTS.items()))) as run:
        assert run.resumed
    with pytest.raises(RunDirectoryError, match=r"n was 100, now 50; seed was 0, now 1"):
        RunDirectory.open(tmp_path, {**ARGUMENTS, "n": 50, "seed": 1})
    with pytest.raises(RunDirectoryError, match=r"extra was None, now True"):
        RunDirectory.open(tmp_path, {**ARGUMENTS, "extra": True})


def test_a_refusal_leaves_the_directory_unlocked_and_unchanged(tmp_path):
    RunDirectory.open(tmp_path, ARGUMENTS).close()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(RunDirectoryError):
        RunDirectory.open(tmp_path, {"n": 1})
    assert (tmp_path / "config.json").read_bytes() == before
    RunDirectory.open(tmp_path, ARGUMENTS).close()


def test_parts_of_other_versions_are_not_mixed(tmp_path, monkeypatch):
    RunDirectory.open(tmp_path, ARGUMENTS).close()
    now = {**runs.versions(), "torch": "99.0"}
    monkeypatch.setattr(runs, "versions", lambda: now)
    with pytest.raises(RunDirectoryError, match=r"other versions: torch was .*, now 99\.0"):
        RunDirectory.open(tmp_path, ARGUMENTS)


def test_config_says_what_the_run_is(tmp_path):
    RunDirectory.open(tmp_path, ARGUMENTS).close()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["arguments"] == ARGUMENTS
    assert config["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert config["hash"] == runs.hash_of(ARGUMENTS)


def test_a_directory_of_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match=r"not from a circuitkd run \(thesis\.tex"):
        RunDirectory.open(tmp_path, ARGUMENTS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": "gpt2"}'])
def test_a_config_that_is_not_ours_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"config\.json"):
        RunDirectory.open(tmp_path, ARGUMENTS)
    assert (tmp_path / "config.json").read_text() == content


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.open(tmp_path / "file", ARGUMENTS)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        RunDirectory.open(tmp_path / "file" / "run", ARGUMENTS)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_read_only_directory_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="permission denied"):
        RunDirectory.open(tmp_path / "run", ARGUMENTS)
    tmp_path.chmod(0o700)


def test_a_write_that_fails_says_how_to_continue(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        (tmp_path / "result.json").mkdir()
        with pytest.raises(RunError, match="same arguments to continue"):
            run.write_text("result.json", "{}")
    assert not list(tmp_path.glob(".circuitkd-tmp-*"))


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    leftover = tmp_path / ".circuitkd-tmp-1-config.json"
    leftover.write_text("{")
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        assert not run.resumed
        assert not leftover.exists()


def test_a_run_that_proved_impossible_does_not_claim_the_directory(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS) as run:
        run.discard()
    with RunDirectory.open(tmp_path, {"n": 1}) as run:
        run.put("key", {"x": torch.ones(1)})
        run.discard()
    with pytest.raises(RunDirectoryError, match="other arguments"):
        RunDirectory.open(tmp_path, ARGUMENTS)


def test_one_process_at_a_time(tmp_path):
    with RunDirectory.open(tmp_path, ARGUMENTS), pytest.raises(RunDirectoryError, match="Another"):
        RunDirectory.open(tmp_path, ARGUMENTS)
    RunDirectory.open(tmp_path, ARGUMENTS).close()


def test_a_killed_process_leaves_whole_parts_and_no_lock(tmp_path):
    script = """
        import os, signal, sys, torch
        from circuitkd.runs import RunDirectory
        run = RunDirectory.open(sys.argv[1], {"n": 1})
        run.put("done", {"x": torch.arange(3)})
        (run.path / "parts" / ".circuitkd-tmp-7-next").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with RunDirectory.open(tmp_path / "run", {"n": 1}) as run:
        assert run.resumed
        assert (run.get("done") or {})["x"].tolist() == [0, 1, 2]
        assert len(part_files(tmp_path / "run")) == 1


def test_another_process_is_told_to_wait(tmp_path):
    script = """
        import sys
        from circuitkd.errors import RunDirectoryError
        from circuitkd.runs import RunDirectory
        try:
            RunDirectory.open(sys.argv[1], {"n": 1})
        except RunDirectoryError as error:
            print(error)
    """
    with RunDirectory.open(tmp_path / "run", {"n": 1}):
        command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "Another process is working in" in answer


def test_checkpoints_without_a_directory(tmp_path):
    nothing, memory = NoCheckpoint(), MemoryCheckpoint()
    tensor = torch.ones(2)
    for checkpoint in (nothing, memory):
        checkpoint.put("key", {"x": tensor})
    tensor.zero_()
    assert nothing.get("key") is None
    assert (memory.get("key") or {})["x"].tolist() == [1, 1]
    scoped = ScopedCheckpoint(memory, "teacher/")
    assert scoped.get("key") is None
    scoped.put("key", {"x": torch.zeros(1)})
    assert (memory.get("teacher/key") or {})["x"].tolist() == [0]
    assert isinstance(memory, runs.Checkpoint)


def test_a_fingerprint_notices_one_changed_weight(tmp_path):
    weights = bytearray(3_000_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text("{}")
    before = runs.fingerprint(tmp_path)
    assert runs.fingerprint(tmp_path) == before
    weights[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert runs.fingerprint(tmp_path) != before
    assert runs.fingerprint(tmp_path / "config.json") != before
