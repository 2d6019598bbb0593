"""Loading models; how architectures differ is said in ``circuitkd.families``.

Every model in circuitkd is a TransformerLens ``TransformerBridge`` (4.x) around the released
Hugging Face network: evaluation mode, eager attention, weights as they were published unless
``processed=True``. Weights are read from safetensors only.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import NewGELUActivation

from circuitkd import _distilbert
from circuitkd._hub import fetch_from_hub
from circuitkd._smollm2 import SMOLLM2, smollm2_directory
from circuitkd.errors import ArchitectureError, InputError, ModelError
from circuitkd.families import FAMILIES, Family
from circuitkd.nodes import Node, component_nodes

BUNDLED_DIRECTORY = Path(__file__).parent / "bundled"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bundled_names() -> tuple[str, ...]:
    """The models that ship with circuitkd, teacher before student.

    >>> "tiny-teacher" in bundled_names()
    True
    """
    found = (config.parent.name for config in BUNDLED_DIRECTORY.glob("*/config.json"))
    return tuple(sorted(found, reverse=True))


def load_model(
    model: str | Path | PreTrainedModel | TransformerBridge,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    dtype: str = "float32",
    processed: bool = False,
) -> TransformerBridge:
    """Load a model for analysis.

    Args:
        model: a bundled name (``"tiny-teacher"``), ``"smollm2-135m"`` (with the extra ``smollm2``),
            a local directory in Hugging Face format, a hub id (``"gpt2"``), or a Hugging Face model
            in memory. The model in memory is copied: it stays as it was, and can still be trained
            and saved. A ``TransformerBridge`` is returned as it is.
        tokenizer: only for a model in memory; tasks need one.
        device: where to put the weights; by default the CPU, or where a model in memory is.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; a model in memory keeps its own.
        processed: fold layer norms and centre the writing weights (TransformerLens' classic
            parametrisation). The function stays the same up to a constant added to all logits.

    Returns:
        The bridge, in evaluation mode, with its tokenizer (or ``None``) at ``.tokenizer``.

    Raises:
        ModelError: unknown name, no network, no safetensors weights, missing or NaN weights.
        ArchitectureError: an architecture that circuitkd does not support.

    >>> load_model("tiny-teacher").cfg.n_layers
    4
    """
    if isinstance(model, TransformerBridge):
        return model
    if dtype not in DTYPES:
        raise InputError(f"Unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}.")
    if isinstance(model, PreTrainedModel):
        name, network = "model in memory", _own_copy(model)
    else:
        name = str(model)
        directory = find_directory(name)
        network = _read_network(directory, name, DTYPES[dtype])
        tokenizer = tokenizer or _read_tokenizer(directory)
    _refuse_nonfinite(network, name)
    if device is not None:
        network.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    return _bridge(network, tokenizer, name, processed)


def find_directory(name: str) -> Path:
    """The local directory of a bundled model, SmolLM2, a path, or a hub id (fetched if needed)."""
    if name in bundled_names():
        return BUNDLED_DIRECTORY / name
    if name == SMOLLM2:
        return smollm2_directory()
    path = Path(name).expanduser()
    if path.is_dir():
        _require_weights((file.name for file in path.iterdir()), name)
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"{name!r} is not a directory with a Hugging Face model (config.json, *.safetensors)."
        )
    directory = fetch_from_hub(name, f"Installed models: {', '.join((*bundled_names(), SMOLLM2))}.")
    _require_weights((file.name for file in directory.iterdir()), name)
    return directory


def _require_weights(files: Iterable[str], name: str) -> None:
    files = set(files)
    if "config.json" not in files:
        raise ModelError(f"{name!r} has no config.json: it is not a Hugging Face model directory.")
    if any(file.endswith(".safetensors") for file in files):
        return
    if any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in files):
        raise ModelError(
            f"{name!r} has pickled weights only, and unpickling can run any code. Convert them: "
            "load the model where you trust it and call save_pretrained, which writes safetensors."
        )
    raise ModelError(f"{name!r} has no weights: no *.safetensors file is there.")


def _read_network(directory: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ModelError(f"The config.json of {name!r} cannot be read: {error}") from error
    family = family_of(getattr(config, "architectures", None), name)
    loader = AutoModelForMaskedLM if family.masked else AutoModelForCausalLM
    try:
        network, report = loader.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            directory,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"The weights of {name!r} cannot be read: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights of {name!r} lack {len(missing)} tensors, first {missing[0]!r}; "
            "they would be random."
        )
    return network


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError):
        return None  # tokenizer_of says what to do, when one is needed


def _own_copy(model: PreTrainedModel) -> PreTrainedModel:
    family_of(model.config.architectures or [type(model).__name__], "the model in memory")
    network = copy.deepcopy(model)
    network.set_attn_implementation("eager")
    return network


def reinitialised(
    model: TransformerBridge, seed: int, *, processed: bool = False
) -> TransformerBridge:
    """A model of the same shape with random weights, drawn by the network's own initialiser.

    The random state of torch is left as it was.

    >>> model = load_model("tiny-student")
    >>> other = reinitialised(model, seed=0)
    >>> other.cfg.n_layers == model.cfg.n_layers, bool((other.W_U == model.W_U).all())
    (True, False)
    """
    original: Any = model.original_model
    label = f"{model_label(model)} with random weights"
    with torch.random.fork_rng(devices=[]):  # the bridge draws random numbers, too
        torch.manual_seed(seed)
        network = type(original)(copy.deepcopy(original.config))
        network = network.to(device=device_of(model), dtype=original.dtype)
        network.set_attn_implementation("eager")
        return _bridge(network, model.tokenizer, label, processed)


def _refuse_nonfinite(network: PreTrainedModel, name: str) -> None:
    for key, weight in network.state_dict().items():
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise ModelError(f"{name!r} holds NaN or infinite weights, first in {key!r}.")


def _fuse_activations(network: PreTrainedModel) -> None:
    """Compute GPT-2's tanh GELU in one kernel instead of eight passes; equal to rounding."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))


def _bridge(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    processed: bool,
) -> TransformerBridge:
    architectures = network.config.architectures or [type(network).__name__]
    _fuse_activations(network)
    if architectures[0] == _distilbert.ARCHITECTURE:
        _distilbert.register()
    bridge = build_bridge_from_module(
        network.eval(),
        architectures[0],
        hf_config=network.config,
        dtype=network.dtype,
        model_name=name,
    )
    # Handed to the builder, the tokenizer would be reloaded as one that adds a BOS to every text.
    bridge.tokenizer = tokenizer
    bridge.eval()
    if processed:
        bridge.process_weights()
    bridge.requires_grad_(False)  # processing makes new parameters
    return bridge


def family_of(architectures: Iterable[str] | None, name: str) -> Family:
    """The family of a network's class; refuses what the engine does not know."""
    for family in FAMILIES:
        if set(family.architectures) & set(architectures or ()):
            return family
    supported = ", ".join(a for family in FAMILIES for a in family.architectures)
    found = ", ".join(architectures or ()) or "no architecture"
    raise ArchitectureError(f"{name} is a {found}. Supported are: {supported}.")


def family_of_model(model: TransformerBridge) -> Family:
    """The family of a loaded model."""
    return family_of([str(model.cfg.architecture)], model_label(model))


def is_parallel(model: TransformerBridge) -> bool:
    """Whether a layer's MLP reads what its attention reads, and not what its attention writes.

    >>> is_parallel(load_model("tiny-student"))
    False
    """
    return bool(getattr(model.cfg, "parallel_attn_mlp", False))


def norm_gain(model: TransformerBridge, norm: torch.nn.Module) -> Float[Tensor, "d_model"]:
    """What a layer norm multiplies the normalised stream with; Gemma stores it less one."""
    weight: Any = norm.weight
    return weight.detach() + float(getattr(model.cfg, "rmsnorm_uses_offset", False))


def tokenizer_of(model: TransformerBridge) -> PreTrainedTokenizerBase:
    """The model's tokenizer; a ``ModelError`` that says how to give one where it has none."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ModelError(
            f"{model_label(model)} has no tokenizer, and a task needs one: use "
            "load_model(model, tokenizer=...), or put tokenizer.json into its directory."
        )
    return tokenizer


def model_label(model: TransformerBridge) -> str:
    """The name that the model was loaded under."""
    return str(model.cfg.model_name)


def component_nodes_of(model: TransformerBridge) -> tuple[Node, ...]:
    """All heads and MLPs of a model, layer by layer.

    >>> len(component_nodes_of(load_model("tiny-student")))
    18
    """
    return component_nodes(model.cfg.n_layers, model.cfg.n_heads)


def device_of(model: TransformerBridge) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.original_model.parameters()).device
