"""Perturbed inputs: which there are, and what a model answers to them.

A *variant* is an out-of-distribution form of the task, other prompts. *Noise* keeps the prompts and
moves their embeddings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits.engine import Replay, rows_per_batch
from circuitkd.circuits.readout import metric_readout
from circuitkd.errors import RunError
from circuitkd.models import family_of_model, model_label
from circuitkd.prompts import PromptGroup, Prompts


@dataclass(frozen=True)
class Condition:
    """One way to put the task: ``clean``, a ``variant`` by name, or ``noise`` of some strength."""

    kind: Literal["clean", "variant", "noise"]
    name: str
    strength: float | None = None

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    @classmethod
    def noise(cls, strength: float) -> "Condition":
        return cls("noise", f"noise {strength:g}", float(strength))


CLEAN = Condition("clean", "clean")


@dataclass(frozen=True)
class Answers:
    """What a model answers at each strength of noise.

    ``metric``: of each prompt, in sampling order. ``top``: the token that it finds likeliest.
    """

    metric: Float[Tensor, "strength prompt"]
    top: Int[Tensor, "strength prompt"]


def answers(
    model: TransformerBridge,
    prompts: Prompts,
    *,
    noise: Sequence[float] = (0.0,),
    seed: int = 0,
    batch_size: int | None = None,
) -> Answers:
    """Run the prompts, with Gaussian noise on their embeddings.

    Args:
        model: from ``load_model``.
        prompts: from ``task.sample`` with this model.
        noise: standard deviations of the noise on each entry, in units of the root mean square of
            the prompts' token embeddings (``embedding_rms``): 1 is noise as long as a typical token
            embedding. Special tokens stay as they are.
        seed: of the noise. The draw of a prompt depends on the seed, its place in sampling order,
            and its shape [pos, d_model]: not on the batch size or on how many prompts there are.
            All strengths scale one draw, and models of one width that cut the text alike get the
            same; models of different widths get different draws of the same relative size.
        batch_size: prompts that go through the model at once.

    Raises:
        RunError: the model gives NaN.
    """
    metric = torch.zeros(len(noise), len(prompts))
    top = torch.zeros(len(noise), len(prompts), dtype=torch.int64)
    rms = embedding_rms(model, prompts)
    for group in prompts.groups:
        replay = Replay(model, group.clean, group.answer)
        read = metric_readout(replay, group, prompts.metric)
        for rows in _slices(group, rows_per_batch(model, group.clean.shape[1], batch_size)):
            places = group.index[rows]
            stream = replay.embed(group.clean[rows])
            drawn = _unit_noise(places.tolist(), stream.shape, seed) if any(noise) else None
            for number, strength in enumerate(noise):
                moved = stream
                if strength and drawn is not None:
                    moved = stream + (strength * rms * drawn * _words(prompts, group)).to(stream)
                end = replay.end_after_block(0, replay.block(0, moved))
                metric[number, places] = read(end[None], rows)[0]
                top[number, places] = replay.end_logits(end).argmax(-1).cpu()
    if not torch.isfinite(metric).all():
        raise RunError(f"{model_label(model)} gave NaN or infinite metrics; try dtype float32.")
    return Answers(metric, top)


def embedding_rms(model: TransformerBridge, prompts: Prompts) -> float:
    """Root mean square of the entries of the prompts' token embeddings, without special tokens.

    As they enter block 0: Gemma scales them first, and encoders add positions and normalise the
    sum. Where learned positions are only added (GPT-2), it is that of the tokens alone.
    """
    added = hasattr(model, "pos_embed") and family_of_model(model).norms != "after"
    parts = []
    for group in prompts.groups:
        words = _words(prompts, group)[:, 0] > 0
        if added:
            with torch.no_grad():
                embeddings = model.W_E[group.clean[:, words].to(model.W_E.device)]
        else:
            embeddings = Replay(model, group.clean, group.answer).embed(group.clean)
            embeddings = embeddings[:, words.to(embeddings.device)]
        parts.append(embeddings.double().square().flatten())
    return float(torch.cat(parts).mean().sqrt())


def parameter_count(model: TransformerBridge) -> int:
    """Number of parameters of the released network; tied embeddings count once.

    >>> from circuitkd import load_model
    >>> parameter_count(load_model("tiny-student"))
    531200
    """
    # The wrapped network holds some weights twice, so an empty one of the same shape is counted.
    network = model.original_model
    with torch.device("meta"):
        empty = type(network)(network.config)  # pyright: ignore[reportCallIssue]
    return sum(parameter.numel() for parameter in empty.parameters())


def _unit_noise(places: Sequence[int], shape: Sequence[int], seed: int) -> Float[Tensor, "b pos d"]:
    draws = [
        np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(place,))).standard_normal(
            tuple(shape[1:]), dtype=np.float32
        )
        for place in places
    ]
    return torch.from_numpy(np.stack(draws))


def _words(prompts: Prompts, group: PromptGroup) -> Float[Tensor, "pos 1"]:
    """1 at positions that read text, 0 at those of special tokens."""
    if group.spans is not None:
        words = group.spans[0, :, 0] >= 0
    else:  # a group made by hand says only whether there is a BOS
        words = torch.arange(group.clean.shape[1]) >= (0 if prompts.bos is None else 1)
    return words.float()[:, None]


def _slices(group: PromptGroup, size: int) -> Iterator[slice]:
    for first in range(0, len(group), size):
        yield slice(first, min(first + size, len(group)))
