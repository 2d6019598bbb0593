"""How what attention and MLPs write joins the residual stream.

Usually it is added. Where a network normalises it first (Gemma 2), or normalises the sum (BERT), a
write reaches later blocks through those norms. An edge then means: what the sender writes changes,
everything else that is written keeps its clean value, and the stream is joined anew from the
sender to the receiver, norms included. A change of the stream is *carried* along these joins;
attribution carries it along their derivatives.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.families import Family
from circuitkd.models import norm_gain

Part = Literal["attention", "mlp"]
PARTS: tuple[Part, ...] = ("attention", "mlp")

_NORMS = {
    ("after", "attention"): "ln1",
    ("after", "mlp"): "ln2",
    ("both", "attention"): "ln1_post",
    ("both", "mlp"): "ln2_post",
}


class Joins:
    """The joins of one model. ``additive``: what is written is simply added."""

    def __init__(self, model: TransformerBridge, family: Family) -> None:
        self._model, self._norms = model, family.norms
        self.additive = family.norms == "before"

    def join(
        self,
        layer: int,
        part: Part,
        stream: Float[Tensor, "*#stack pos d_model"],
        written: Float[Tensor, "*#stack pos d_model"],
    ) -> Float[Tensor, "*stack pos d_model"]:
        """The stream behind a part of a block, from the stream before it and what it writes."""
        if self.additive:
            return stream + written
        norm = self.norm(layer, part)
        return norm(stream + written) if self._norms == "after" else stream + norm(written)

    def norm(self, layer: int, part: Part) -> Any:
        """The layer norm of a join that is not additive."""
        return getattr(self._model.blocks[layer], self.norm_name(part))

    def norm_name(self, part: Part) -> str:
        """Its name within the block."""
        return _NORMS[self._norms, part]

    @torch.no_grad()
    def carry(
        self,
        layer: int,
        part: Part,
        changes: Float[Tensor, "batch sender pos d_model"],
        n_earlier: int,
        n_own: int,
        seen: Mapping[str, Tensor],
    ) -> None:
        """Carry small changes along a join, in place: the first order of what ``join`` does.

        The first ``n_earlier`` senders changed the stream, the next ``n_own`` what the part
        writes; behind the join all of them have changed the stream. ``seen`` holds the norm's
        ``normalized`` input and its ``scale`` in the run that is differentiated.
        """
        if self.additive:
            return
        first = 0 if self._norms == "after" else n_earlier
        moved = changes[:, first : n_earlier + n_own]
        norm = self.norm(layer, part)
        along = seen[f"{part}.normalized.{layer}"][:, None]
        scale = seen[f"{part}.scale.{layer}"][:, None]
        if not norm.uses_rms_norm:
            moved -= moved.mean(-1, keepdim=True)
        size = einsum(moved, along.to(moved.dtype), "b s pos d, b one pos d -> b s pos")
        moved.sub_(along * (size[..., None] / along.shape[-1]))
        moved.mul_((norm_gain(self._model, norm) / scale).to(moved.dtype))
