"""From the final residual stream at the answer position to one number a prompt."""

from collections.abc import Callable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from circuitkd.circuits.engine import Replay
from circuitkd.errors import InputError
from circuitkd.metrics import UNITS, probability_difference
from circuitkd.prompts import PromptGroup

Readout = Callable[[Float[Tensor, "stack batch d_model"], slice], Float[Tensor, "stack batch"]]


def metric_readout(replay: Replay, group: PromptGroup, metric: str) -> Readout:
    """A function (final residual streams, which prompts) -> metric, float32 on the CPU.

    The streams are stacked: ``stack`` versions (say, ablations) of the same ``batch`` prompts of
    ``group``. The logit difference reads two rows of the unembedding and nothing else.
    """
    if metric not in UNITS:
        raise InputError(f"Unknown metric {metric!r}: choose one of {', '.join(UNITS)}.")
    if metric == "probability_difference":
        return _probability_readout(replay, group)
    return _logit_readout(replay, group)


def _logit_readout(replay: Replay, group: PromptGroup) -> Readout:
    model = replay.model
    correct, incorrect = group.correct.to(replay.device), group.incorrect.to(replay.device)
    with torch.no_grad():
        rows = model.W_U.T
        direction = rows[correct].float() - rows[incorrect].float()
        bias = getattr(model, "b_U", None)
        offset = torch.zeros(len(correct)) if bias is None else bias[correct] - bias[incorrect]
    offset = offset.to(replay.device, torch.float32)

    @torch.no_grad()
    def read(end: Tensor, prompts: slice) -> Tensor:
        normed = replay.final(end).float()
        value = einsum(normed, direction[prompts], "stack batch d, batch d -> stack batch")
        return (value + offset[prompts]).cpu()

    return read if replay.cap is None else _capped_readout(replay, correct, incorrect)


def _capped_readout(replay: Replay, correct: Tensor, incorrect: Tensor) -> Readout:
    """A soft cap bends each logit by itself, so both are computed."""

    @torch.no_grad()
    def read(end: Tensor, prompts: slice) -> Tensor:
        rows = torch.arange(end.shape[1], device=end.device)
        stack = [replay.end_logits(one).float() for one in end]
        return torch.stack(
            [one[rows, correct[prompts]] - one[rows, incorrect[prompts]] for one in stack]
        ).cpu()

    return read


def _probability_readout(replay: Replay, group: PromptGroup) -> Readout:
    if group.candidates is None or group.valid is None:
        raise InputError("These prompts have no sets of answers: use metric='logit_difference'.")
    candidates, valid = group.candidates.to(replay.device), group.valid.to(replay.device)

    @torch.no_grad()
    def read(end: Tensor, prompts: slice) -> Tensor:
        stack = [
            probability_difference(replay.end_logits(rows), candidates, valid[prompts])
            for rows in end
        ]
        return torch.stack(stack).cpu()

    return read
