"""What an installed circuitkd is made of, and what importing it costs."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import circuitkd
from circuitkd.tasks import task_names

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with what is installed: no network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_holds_tasks_bundled_models_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"circuitkd/tasks_data/{name}.yaml" for name in task_names()} <= names
    for model in ("tiny-teacher", "tiny-student"):
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            assert f"circuitkd/bundled/{model}/{file}" in names
    assert "circuitkd/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "benchmarks/"))]


@pytest.mark.slow
def test_a_clean_environment_runs_the_commands_from_elsewhere(wheel, tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # The dependencies are those of this environment; circuitkd itself must not come from here.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def circuitkd_(*arguments: str) -> str:
        command = [str(environment / "bin" / "circuitkd"), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [str(python), "-c", "import circuitkd; print(circuitkd.__file__)"]
    assert (
        str(site)
        in subprocess.run(
            where, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True
        ).stdout
    )
    listed = circuitkd_("tasks")
    assert all(name in listed for name in task_names())
    assert "tiny-teacher" in circuitkd_("models")
    assert "[END]" in circuitkd_("tasks", "show", "ioi", "--model", "tiny-student", "-n", "1")


def test_importing_circuitkd_imports_nothing_heavy():
    script = "import sys, circuitkd; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", circuitkd.__all__)
def test_every_public_name_is_there_and_listed(name):
    assert getattr(circuitkd, name) is not None
    assert name in dir(circuitkd)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = circuitkd.nonsense  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "first",
    [
        "import circuitkd.compare",
        "import circuitkd.compare.alignment",
        "import circuitkd.compare.alignment as module; module.paper_alignment",
        "circuitkd.compare",
        "from circuitkd import compare; assert compare is circuitkd.compare",
        "circuitkd.paper_alignment",
    ],
)
def test_compare_can_be_called_whatever_was_imported_before(first):
    script = f"import circuitkd; {first}; print(callable(circuitkd.compare))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_calling_the_package_is_calling_its_function():
    with pytest.raises(circuitkd.CircuitKDError, match="too few"):
        circuitkd.compare("a", "b", "ioi", n=1)


def test_everything_that_is_needed_is_pinned_by_a_plain_version():
    pins = [Requirement(line) for line in lines_of(ROOT / "constraints.txt")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    assert not [pin for pin in pins if pin.url or "+" in str(pin.specifier)]
    needed = [Requirement(text) for text in metadata.requires("circuitkd") or ()]
    direct = {
        canonicalize_name(each.name)
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": "dev"})
    }
    assert {"torch", "pytest"} <= direct
    assert direct <= {canonicalize_name(pin.name) for pin in pins}


def lines_of(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
