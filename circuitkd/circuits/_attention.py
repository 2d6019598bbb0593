"""The heads of one layer as functions of separate query, key and value inputs.

The network computes all heads from one residual stream. Edges need them apart: one head's query
from a changed stream, everything else from the clean one. The formulas are written out here, and
checked against the network's own heads before they are used.
"""

import math

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from circuitkd.circuits.edges import ATTENTION_KINDS, Receiver, layout_of
from circuitkd.circuits.engine import Edit, Replay, hooked
from circuitkd.errors import ArchitectureError
from circuitkd.models import model_label


class LayerAttention:
    """Attention of one layer, for prompts of one length.

    Promises that ``attend(*inputs(stream, stream, stream))`` is the layer's z, checked on the
    stream it is made with.
    """

    def __init__(
        self, replay: Replay, layer: int, stream: Float[Tensor, "batch pos d_model"]
    ) -> None:
        self._replay, self.layer = replay, layer
        self._layout = layout_of(replay.model)
        block = replay.model.blocks[layer]
        attention = block.attn
        self._norm = None if replay.family.norms == "after" else block.ln1
        self._weights = {kind: _weight(attention, kind) for kind in ATTENTION_KINDS}
        self._biases = {kind: _bias(attention, kind) for kind in ATTENTION_KINDS}
        self._output_bias = _bias(attention, "O")
        self._norms = {kind: getattr(attention, f"{kind}_norm", None) for kind in ("q", "k")}
        original = attention.original_component
        usual = getattr(original, "scaling", 1 / math.sqrt(replay.model.cfg.d_head))
        scale = replay.family.attention_scale
        self.scale = float(usual if scale is None else scale)
        self._softcap: float | None = getattr(original, "attn_logit_softcapping", None)
        self._seen_keys = self._keys_that_are_seen(stream[:1])
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._rotate_and_check(stream[:1])

    # ------------------------------------------------------------------ pieces

    @torch.no_grad()
    def normed(self, stream: Float[Tensor, "*stack pos d_model"]) -> Tensor:
        """What attention reads: the stream, behind the layer norm where one comes before it."""
        if self._norm is None:
            return stream
        return self._norm(stream.flatten(0, -3)).unflatten(0, stream.shape[:-2])

    @torch.no_grad()
    def project(
        self, kind: str, head: int, normed: Float[Tensor, "*stack pos d_model"]
    ) -> Float[Tensor, "*stack pos d_head"]:
        """One head's query, or one group's key or value; queries and keys are rotated.

        Of fewer positions than the prompts have, they are taken to be the last ones.
        """
        out = normed @ self._weights[kind][head]
        if (bias := self._biases[kind]) is not None:
            out = out + bias[head]
        return out if kind == "v" else self._rotate(self._head_norm(kind, out))

    @torch.no_grad()
    def project_all(
        self, kind: str, normed: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch head pos d_head"]:
        """All heads' queries, or all groups' keys or values."""
        out = einsum(normed, self._weights[kind], "b pos d, h d d_head -> b h pos d_head")
        if (bias := self._biases[kind]) is not None:
            out = out + bias[:, None]
        return out if kind == "v" else self._rotate(self._head_norm(kind, out))

    @torch.no_grad()
    def pattern(
        self,
        query: Float[Tensor, "*#stack query d_head"],
        key: Float[Tensor, "*#stack key d_head"],
    ) -> Float[Tensor, "*stack query key"]:
        """Attention pattern; the queries are those of the last positions."""
        scores = query @ key.transpose(-1, -2) * self.scale
        if self._softcap is not None:
            scores = (scores / self._softcap).tanh() * self._softcap
        hidden = ~self._seen_keys[-scores.shape[-2] :]
        return scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(query.dtype)

    @torch.no_grad()
    def attend(
        self,
        query: Float[Tensor, "*#stack query d_head"],
        key: Float[Tensor, "*#stack key d_head"],
        value: Float[Tensor, "*#stack key d_head"],
    ) -> Float[Tensor, "*stack query d_head"]:
        """What the heads write before W_O; the queries are those of the last positions."""
        return self.pattern(query, key) @ value

    @torch.no_grad()
    def at_end(
        self, stream: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch head d_head"]:
        """What ``attend`` gives all heads at the answer's position.

        Values are not computed: the pattern is applied to what they are projected from.
        """
        normed = self.normed(stream)
        query = self.project_all("q", normed[:, self._replay.answer_slice])
        key = self.for_query_heads(self.project_all("k", normed))
        pattern = self.pattern(query, key)[:, :, 0]
        read = einsum(pattern, normed, "b head key, b key d -> b head d")
        weight = self.for_query_heads(self._weights["v"])
        z = einsum(read, weight, "b head d, head d d_head -> b head d_head")
        bias = self._biases["v"]
        return z if bias is None else z + self.for_query_heads(bias[:, None])[:, 0]

    @torch.no_grad()
    def output(self, z: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch d_model"]:
        """What the attention adds to the residual stream."""
        writes = self._replay.head_writes(self.layer, z).sum(-2)
        return writes if self._output_bias is None else writes + self._output_bias

    def for_query_heads(
        self, values: Float[Tensor, "*stack kv_head pos d_head"]
    ) -> Float[Tensor, "*stack head pos d_head"]:
        """Keys or values of the groups, repeated for the query heads that share them."""
        size = self._layout.n_heads // self._layout.n_kv_heads
        return values.repeat_interleave(size, dim=-3)

    # ------------------------------------------------------------------ set up and check

    def _rotate(self, x: Tensor) -> Tensor:
        if self._rotation is None:
            return x
        cos, sin = (part[..., -x.shape[-2] :, :] for part in self._rotation)  # the last positions
        x, plain = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]  # some rotate a part only
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return torch.cat([x * cos + turned * sin, plain], -1)

    def _head_norm(self, kind: str, x: Float[Tensor, "*stack d_head"]) -> Tensor:
        """The norm that some families put on each head's queries and keys."""
        norm = self._norms[kind]
        return x if norm is None else norm.original_component(x)

    def _keys_that_are_seen(
        self, stream: Float[Tensor, "one pos d_model"]
    ) -> Bool[Tensor, "query key"]:
        """Which keys each query may see: with queries of zero, all of them are seen alike."""
        seen: dict[str, Tensor] = {}
        edits: dict[str, Edit] = {
            f"blocks.{self.layer}.attn.q.hook_out": torch.zeros_like,
            f"blocks.{self.layer}.attn.hook_pattern": _keep(seen, "pattern"),
        }
        with hooked(edits, self._replay.model):
            self._replay.block(self.layer, stream)
        return seen["pattern"][0, 0] > 0

    @torch.no_grad()
    def _rotate_and_check(self, stream: Float[Tensor, "one pos d_model"]) -> None:
        """Take over the rotation, where there is one; refuse heads that compute something else."""
        seen: dict[str, Tensor] = {}
        points = {name: f"blocks.{self.layer}.attn.hook_{name}" for name in ("z", "cos", "sin")}
        hooks = self._replay.model.hook_dict
        edits = {
            point: _keep(seen, name)
            for name, point in points.items()
            if name == "z" or point in hooks
        }
        with hooked(edits, self._replay.model):
            self._replay.block(self.layer, stream)
        if "cos" in seen:
            self._rotation = seen["cos"], seen["sin"]
        normed = self.normed(stream)
        query, key, value = (self.project_all(kind, normed) for kind in ATTENTION_KINDS)
        own = self.attend(query, self.for_query_heads(key), self.for_query_heads(value))
        theirs = seen["z"].flatten(2)
        error = (rearrange(own, "b head pos d -> b pos (head d)") - theirs).float().abs().max()
        tolerance = 1e-3 if theirs.dtype == torch.float32 else 5e-2
        if not error <= tolerance * theirs.float().abs().max().clamp_min(1e-6):
            raise ArchitectureError(
                f"{model_label(self._replay.model)}: the attention of layer {self.layer} is not "
                f"the one that circuitkd knows (off by {float(error):.2g}), so edges into queries, "
                "keys and values cannot be patched."
            )


class CleanHeads:
    """The heads of one layer on clean prompts, each of whose inputs can be replaced alone."""

    def __init__(
        self,
        attention: LayerAttention,
        replay: Replay,
        stream: Float[Tensor, "batch pos d_model"],
        z: Float[Tensor, "batch pos head d_head"],
    ) -> None:
        self._attention, self._replay = attention, replay
        self._layout = layout_of(replay.model)
        normed = attention.normed(stream)
        self._clean = {kind: attention.project_all(kind, normed) for kind in ATTENTION_KINDS}
        self._z = rearrange(z, "b pos head d -> b head pos d")

    @torch.no_grad()
    def write_change(
        self,
        receiver: Receiver,
        stream: Float[Tensor, "batch stack pos d_model"],
        positions: slice = slice(None),
    ) -> Float[Tensor, "batch stack _ d_model"]:
        """Change of the attention's output when ``receiver`` reads ``stream``, all else clean.

        ``positions``: of the output; all, or the answer's.
        """
        heads = self._layout.query_heads(receiver)
        group = heads.start * self._layout.n_kv_heads // self._layout.n_heads
        index = receiver.head if receiver.head is not None else 0
        parts = {
            "q": self._clean["q"][:, None, heads],
            "k": self._clean["k"][:, None, group : group + 1],
            "v": self._clean["v"][:, None, group : group + 1],
        }
        normed = self._attention.normed(stream)
        parts[receiver.kind] = self._attention.project(receiver.kind, index, normed)[:, :, None]
        z = self._attention.attend(parts["q"][..., positions, :], parts["k"], parts["v"])
        change = z - self._z[:, None, heads, positions]
        return einsum(
            change,
            self._replay.W_O(self._attention.layer)[heads],
            "b stack head pos d_head, head d_head d -> b stack pos d",
        )


def _weight(attention: torch.nn.Module, kind: str) -> Float[Tensor, "head d_model d_head"]:
    return getattr(attention, f"W_{kind.upper()}").detach()


def _bias(attention: torch.nn.Module, kind: str) -> Tensor | None:
    bias = getattr(attention, f"b_{kind.upper()}", None)
    return None if bias is None else bias.detach()


def _keep(seen: dict[str, Tensor], key: str) -> Edit:
    def keep(tensor: Tensor) -> None:
        seen[key] = tensor.detach()

    return keep
