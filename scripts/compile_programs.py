"""Compile two RASP programs with Tracr (Lindner et al. 2023) into weights for the tests.

Writes ``compiled_<program>.safetensors`` and ``compiled_programs.json`` to ``tests/data``: the
compiled weights as they are, what each dimension of the residual stream means, and what Tracr's own
transformer computes for some inputs. Tracr needs JAX, which no test should need, so this is run by
hand, in an environment of its own, and its output is kept in the repository:

    python -m venv tracr-env
    tracr-env/bin/pip install -c constraints.txt tracr-pypi==1.0.0 jax==0.10.2 dm-haiku==0.0.17 \
        safetensors
    JAX_PLATFORMS=cpu tracr-env/bin/python scripts/compile_programs.py

With ``--check`` it writes nothing, and fails where the files differ from what is compiled now.
"""

# pyright: reportMissingImports=false

import argparse
import json
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tracr.compiler import assemble, compiling, lib
from tracr.rasp import rasp

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
VERSIONS = ("tracr-pypi", "jax", "dm-haiku")
EXAMPLES = 24


@dataclass(frozen=True)
class Program:
    """A RASP program and the inputs that it is compiled for."""

    expression: rasp.SOp
    vocabulary: tuple[str, ...]
    max_length: int
    says: str


def programs() -> dict[str, Program]:
    is_x = (rasp.tokens == "x").named("is_x")
    return {
        "reverse": Program(
            lib.make_reverse(rasp.tokens),
            ("a", "b", "c", "d", "e"),
            5,
            "the tokens in reverse order; at the last position, the first token",
        ),
        "x_proportion": Program(
            lib.make_frac_prevs(is_x).named("x_proportion"),
            ("x", "y", "z"),
            5,
            "the share of x among the tokens so far; at the last position, among all",
        ),
    }


def compiled(program: Program) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights, and what must be known to read them."""
    model = compiling.compile_rasp_to_model(
        program.expression, set(program.vocabulary), program.max_length, causal=True
    )
    weights, biases = {}, 0.0
    for module, parts in model.params.items():
        for kind, value in parts.items():
            if kind == "b":
                biases = max(biases, float(np.abs(value).max()))
            else:
                weights[module] = np.asarray(value, np.float32)
    if biases:
        raise SystemExit("Tracr set a bias: the tests' conversion does not know any.")
    encoder = model.input_encoder
    rows, last = examples(program, model)
    about = {
        "computes": program.says,
        "vocabulary": list(program.vocabulary),
        "max_length": program.max_length,
        "layers": model.model_config.num_layers,
        "heads": model.model_config.num_heads,
        "key_size": model.model_config.key_size,
        "tokens": {str(token): number for token, number in sorted(encoder.encoding_map.items())},
        "residual": model.residual_labels,
        "output": output_labels(program, model.residual_labels),
        "examples": rows,
    }
    return {**weights, "examples/residual": last}, about


def output_labels(program: Program, labels: list[str]) -> dict[str, str]:
    """Dimensions that hold the output, by its value; ``""`` where it is one number."""
    own = [label for label in labels if label.partition(":")[0] == program.expression.label]
    return {label.partition(":")[2]: label for label in own}


def examples(
    program: Program, model: assemble.AssembledTransformerModel
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Inputs with Tracr's outputs; and its residual stream at the last position."""
    generator = np.random.default_rng(0)
    rows, last = [], []
    for _ in range(EXAMPLES):
        length = int(generator.integers(2, program.max_length + 1))
        tokens = [str(token) for token in generator.choice(program.vocabulary, length)]
        result = model.apply([compiling.COMPILER_BOS, *tokens])
        rows.append({"tokens": tokens, "output": result.decoded[-1]})
        last.append(np.asarray(result.transformer_output[0, -1], np.float32))
    return rows, np.stack(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    check = parser.parse_args().check
    about: dict[str, Any] = {"versions": {name: metadata.version(name) for name in VERSIONS}}
    for name, program in programs().items():
        weights, about[name] = compiled(program)
        path = DATA / f"compiled_{name}.safetensors"
        if check:
            kept = load_file(path)
            same = kept.keys() == weights.keys() and all(
                np.allclose(kept[key], weights[key], atol=1e-5) for key in weights
            )
            if not same:
                sys.exit(f"{path.name} is not what Tracr compiles now.")
        else:
            save_file(weights, path)
    text = json.dumps(about, indent=1) + "\n"
    path = DATA / "compiled_programs.json"
    if check:
        kept, now = json.loads(path.read_text()), json.loads(text)
        if {**kept, "versions": None} != {**now, "versions": None}:
            sys.exit(f"{path.name} is not what Tracr compiles now.")
    else:
        path.write_text(text)


if __name__ == "__main__":
    main()
