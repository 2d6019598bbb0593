"""The intervention engine: run a model's blocks from any layer on.

One forward pass over a single prompt records how the network calls each of its blocks (masks,
positions). Prompts of one shape need nothing else, so afterwards every block can be called alone
on any batch of residual streams. The same pass checks that the engine understands the network:
the writes of heads and MLPs must join to its residual stream (``circuitkd.circuits._joins``) and
give its logits.

Hooks are plain PyTorch hooks on TransformerLens' hook points. They are removed when the block
that set them ends, however it ends, and must fire exactly once a call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._joins import Joins
from circuitkd.errors import ArchitectureError, HookError, InputError
from circuitkd.families import first_output
from circuitkd.models import device_of, family_of_model, is_parallel, model_label

_CPU_TOKENS = 740  # larger stacks leave the caches of a CPU and run slower
_GPU_TOKENS = 65_536

Edit = Callable[[Tensor], Tensor | None]


class _EnoughSeenError(Exception):
    """Ends a forward pass whose rest is not wanted."""


@contextmanager
def hooked(edits: Mapping[str, Edit], model: TransformerBridge) -> Iterator[None]:
    """Call ``edits[name](tensor)`` at each named hook point; what it returns replaces the tensor.

    ``None`` keeps the tensor. Leaving the context removes the hooks.

    Raises:
        HookError: a hook point is missing, or did not fire exactly once.
    """
    fired = dict.fromkeys(edits, 0)
    handles = []

    def watch(name: str, edit: Edit) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def hook(_module: nn.Module, _args: Any, tensor: Tensor) -> Tensor | None:
            fired[name] += 1
            return edit(tensor)

        return hook

    try:
        for name, edit in edits.items():
            if name not in model.hook_dict:
                raise HookError(f"{model_label(model)} has no hook point {name!r}.")
            handles.append(model.hook_dict[name].register_forward_hook(watch(name, edit)))
        yield
    finally:
        for handle in handles:
            handle.remove()
    silent = [f"{name} fired {count} times" for name, count in fired.items() if count != 1]
    if silent:
        raise HookError(f"Hooks must fire once a call, but {'; '.join(silent)}.")


@dataclass(frozen=True)
class Observed:
    """What one block did on a batch of prompts."""

    pre: Float[Tensor, "batch pos d_model"]  # the stream that enters
    z: Float[Tensor, "batch pos head d_head"]
    attention: Float[Tensor, "batch pos d_model"]  # what it writes
    read: Float[Tensor, "batch pos d_model"]  # by the MLP, before its layer norm
    mid: Float[Tensor, "batch pos d_model"]  # the stream after attention
    mlp: Float[Tensor, "batch pos d_model"]
    post: Float[Tensor, "batch pos d_model"]
    pattern: Float[Tensor, "batch head query key"] | None = None

    def of(self, prompts: slice) -> "Observed":
        """The same of some of the prompts."""
        return self._each(lambda part: part[prompts])

    @classmethod
    def joined(cls, parts: "Sequence[Observed]") -> "Observed":
        """The same of the prompts of all parts."""
        kept = (field.name for field in fields(cls) if getattr(parts[0], field.name) is not None)
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in kept})

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Observed":
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return Observed(**{name: change(part) for name, part in kept.items() if part is not None})


class Replay:
    """The blocks of one model, each callable alone, for prompts of one token length.

    Promises: ``block(l, embed(tokens))`` chained over all layers is the network's own residual
    stream, and ``end_logits`` of its answer position the network's own logits. Does not promise
    gradients, and holds only for prompts as long as the one it was made with.

    ``answer``: the position at which the model answers, the last one or an encoder's mask.
    """

    def __init__(
        self, model: TransformerBridge, tokens: Int[Tensor, "batch pos"], answer: int = -1
    ) -> None:
        if model.training:
            raise InputError(
                f"{model_label(model)} is in training mode, where dropout makes every run another: "
                "call model.eval() first."
            )
        self.model = model
        self.family = family_of_model(model)
        self.parallel = is_parallel(model)
        self.joins = Joins(model, self.family)
        self.cap: float | None = getattr(
            model.original_model.config, "final_logit_softcapping", None
        )
        self.answer = answer
        self.answer_slice = slice(answer, answer + 1 if answer != -1 else None)
        self.n_layers: int = model.cfg.n_layers
        self.device = device_of(model)
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._record(tokens[:1].to(self.device))

    # ------------------------------------------------------------------ running

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters block 0."""
        entering: list[Tensor] = []

        def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering.append(args[0] if args else kwargs["hidden_states"])
            raise _EnoughSeenError

        handle = self.model.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with suppress(_EnoughSeenError):
                self.model(tokens.to(self.device), use_cache=False)
        finally:
            handle.remove()
        return entering[0]

    @torch.no_grad()
    def block(
        self, layer: int, pre: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after block ``layer``."""
        args, kwargs = self._calls[layer]
        return first_output(self.model.blocks[layer](pre, *args, **kwargs))

    @torch.no_grad()
    def observe(
        self, layer: int, pre: Float[Tensor, "batch pos d_model"], *, pattern: bool = False
    ) -> Observed:
        """Run block ``layer`` and keep what its parts did."""
        seen: dict[str, Tensor] = {}
        points = {
            "z": "attn.hook_z",
            "attention": "attn.o.hook_out",
            "mlp": "mlp.hook_out",
        }
        if pattern:
            points["pattern"] = "attn.hook_pattern"
        edits = {f"blocks.{layer}.{point}": _keep(seen, key) for key, point in points.items()}
        with hooked(edits, self.model):
            post = self.block(layer, pre)
        seen["z"] = rearrange(
            seen["z"].flatten(2), "batch pos (head d) -> batch pos head d", d=self.model.cfg.d_head
        )
        mid = self.after_attention(layer, pre, seen["attention"])
        read = pre if self.parallel else mid
        mlp = seen["mlp"].reshape(mid.shape)
        pattern_seen = seen.get("pattern")
        return Observed(pre, seen["z"], seen["attention"], read, mid, mlp, post, pattern_seen)

    @torch.no_grad()
    def after_attention(
        self,
        layer: int,
        pre: Float[Tensor, "*#stack pos d_model"],
        written: Float[Tensor, "*#stack pos d_model"],
    ) -> Float[Tensor, "*stack pos d_model"]:
        """The stream after attention, from the stream before it and what its heads write."""
        return self.joins.join(layer, "attention", pre, written)

    @torch.no_grad()
    def after_mlp(
        self,
        layer: int,
        mid: Float[Tensor, "*#stack pos d_model"],
        written: Float[Tensor, "*#stack pos d_model"],
    ) -> Float[Tensor, "*stack pos d_model"]:
        """The stream after a block, from the stream after its attention and what its MLP writes."""
        return self.joins.join(layer, "mlp", mid, written)

    def at(self, layer: int) -> slice:
        """The positions that count after a layer's attention: in the last one, the answer's."""
        return self.answer_slice if layer == self.n_layers - 1 else slice(None)

    @torch.no_grad()
    def mlp(
        self, layer: int, read: Float[Tensor, "*stack pos d_model"]
    ) -> Float[Tensor, "*stack pos d_model"]:
        """What the MLP of a layer writes when it reads the residual stream ``read``."""
        written = self.family.mlp(self.model.blocks[layer], read.flatten(0, -3))
        return written.reshape(read.shape)  # some networks line up the tokens of all prompts

    def finish(
        self,
        layer: int,
        pre: Float[Tensor, "*stack pos d_model"],
        mid: Float[Tensor, "*stack pos d_model"],
    ) -> Float[Tensor, "*stack pos d_model"]:
        """The rest of a block from the residual streams before and after its attention."""
        return self.after_mlp(layer, mid, self.mlp(layer, pre if self.parallel else mid))

    def end_after_attention(
        self, layer: int, seen: Observed, change: Float[Tensor, "*stack batch pos d_model"]
    ) -> Float[Tensor, "*stack batch d_model"]:
        """The final stream at the answer, with ``change`` added to what attention writes."""
        last, at = layer == self.n_layers - 1, self.at(layer)
        if self.parallel:
            post = seen.post[:, at] + change[..., at, :]
        else:
            written = seen.attention[:, at] + change[..., at, :]
            mid = self.after_attention(layer, seen.pre[:, at], written)
            post = self.after_mlp(layer, mid, self.mlp(layer, mid))
        stack = post.shape[:-2]
        end = post[..., -1, :] if last else self.end_after_block(layer, post.flatten(0, -3))
        return end.reshape(*stack, -1)

    @torch.no_grad()
    def end_after_block(
        self, layer: int, post: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch d_model"]:
        """The final residual stream at the answer, from the output of block ``layer``.

        The last block's W_O and MLP read the answer's position only: nothing after them looks
        elsewhere. (The residual stream then holds wrong values at all other positions.)
        """
        last = self.n_layers - 1
        for later in range(layer + 1, last):
            post = self.block(later, post)
        if layer < last:
            cut: dict[str, Edit] = {f"blocks.{last}.attn.o.hook_in": self._at_answer}
            with hooked(cut | self.short_mlp(last), self.model):
                post = self.block(last, post)
        return post[:, self.answer]

    def short_mlp(self, layer: int) -> dict[str, Edit]:
        """Edits that let the MLP read the answer's position only, where the output is right."""
        if self.family.flat_mlp:
            return {}  # there are no positions any more that could be cut
        return {f"blocks.{layer}.{self.family.mlp_input}": self._at_answer}

    @torch.no_grad()
    def final(self, end: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """What the unembedding reads: the final stream behind the final norm, or the head's part
        before the unembedding in an encoder.
        """
        return self.family.head(self.model, end)

    @torch.no_grad()
    def end_logits(self, end: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch vocab"]:
        """All logits at the answer's position."""
        return self.capped(self.model.unembed(self.final(end[:, None]))[:, 0])

    def capped(self, logits: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Logits behind the network's own soft cap, where it has one (Gemma 2)."""
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()

    def _at_answer(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.answer_slice]

    @torch.no_grad()
    def head_writes(
        self, layer: int, z: Float[Tensor, "*batch head d_head"]
    ) -> Float[Tensor, "*batch head d_model"]:
        """What each head adds to the residual stream (without the shared bias)."""
        return einsum(z, self.W_O(layer), "... head d_head, head d_head d -> ... head d")

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:  # noqa: N802
        """The output matrices of a layer's heads."""
        return self.model.blocks[layer].attn.W_O.detach()

    def attention_bias(self, layer: int) -> Tensor | float:
        """What a layer's attention writes beside its heads."""
        bias = getattr(self.model.blocks[layer].attn, "b_O", None)
        return 0.0 if bias is None else bias.detach()

    # ------------------------------------------------------------------ recording and checking

    @torch.no_grad()
    def _record(self, tokens: Int[Tensor, "one pos"]) -> None:
        """Record how each block is called, and check the engine's picture of the network."""
        entering: list[Tensor] = []
        handles = [
            block.register_forward_pre_hook(self._keep_call(entering), with_kwargs=True)
            for block in self.model.blocks
        ]
        seen: dict[str, Tensor] = {}
        edits = {
            f"blocks.{layer}.{point}": _keep(seen, f"{point}.{layer}")
            for layer in range(self.n_layers)
            for point in ("attn.hook_z", "attn.o.hook_out", "mlp.hook_out")
        }
        try:
            with hooked(edits, self.model):
                logits = self.model(tokens, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        if len(entering) != self.n_layers:
            raise HookError(f"{len(entering)} blocks ran in a network of {self.n_layers}.")
        self._check(entering, seen, logits[:, self.answer])

    def _keep_call(self, entering: list[Tensor]) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            entering.append(args[0] if args else kwargs.pop("hidden_states"))
            self._calls.append((args[1:], kwargs))

        return hook

    def _check(
        self, entering: list[Tensor], seen: dict[str, Tensor], logits: Float[Tensor, "one vocab"]
    ) -> None:
        stream = entering[0]
        for layer in range(self.n_layers):
            attention = seen[f"attn.o.hook_out.{layer}"]
            heads = self.W_O(layer)
            z = seen[f"attn.hook_z.{layer}"].flatten(2)
            z = z.unflatten(2, (heads.shape[0], heads.shape[1]))
            writes = self.head_writes(layer, z).sum(-2) + self.attention_bias(layer)
            self._require_equal(writes, attention, f"heads of layer {layer} sum to its attention")
            mid = self.after_attention(layer, stream, attention)
            mlp = seen[f"mlp.hook_out.{layer}"].reshape(mid.shape)
            stream = self.after_mlp(layer, mid, mlp)
            if layer + 1 < self.n_layers:
                self._require_equal(
                    stream, entering[layer + 1], f"writes up to layer {layer} join to the residual"
                )
        own = self.end_logits(stream[:, self.answer])
        self._require_equal(own, logits, "residual stream gives the logits")

    def _require_equal(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        tolerance = 1e-3 if theirs.dtype == torch.float32 else 5e-2
        error = (ours.float() - theirs.float()).abs().max()
        scale = theirs.float().abs().max().clamp_min(1e-6)
        if not error <= tolerance * scale:
            raise ArchitectureError(
                f"{model_label(self.model)}: it does not hold that the {what} "
                f"(off by {float(error):.2g} of {float(scale):.2g}), so it cannot be analysed."
            )


def rows_per_batch(model: TransformerBridge, n_pos: int, batch_size: int | None) -> int:
    """How many prompts of ``n_pos`` tokens go through the model at once."""
    if batch_size is not None:
        return batch_size
    tokens = _CPU_TOKENS if device_of(model).type == "cpu" else _GPU_TOKENS
    return max(1, tokens // n_pos)


def _keep(seen: dict[str, Tensor], key: str) -> Edit:
    def keep(tensor: Tensor) -> None:
        seen[key] = tensor.detach()

    return keep
