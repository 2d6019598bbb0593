"""QK and OV circuits of single heads, from words to words (Elhage et al. 2021).

A head is looked at alone: it reads the token embeddings as if nothing but (on request) the first
MLP came before it, and what it writes goes straight to the unembedding.
"""

from collections.abc import Sequence

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.circuits._attention import LayerAttention
from circuitkd.circuits.engine import Replay
from circuitkd.errors import InputError
from circuitkd.models import device_of, family_of_model, model_label, norm_gain

Tokens = Sequence[int] | Int[Tensor, "token"]


@torch.no_grad()
def qk_circuit(
    model: TransformerBridge,
    layer: int,
    head: int | None,
    tokens: Tokens,
    *,
    keys: Tokens | None = None,
    offset: int = 1,
    after_mlp0: bool = False,
) -> Float[Tensor, "*head query key"]:
    """How much a head at token i wants to attend to an earlier token j: its score before softmax.

    Queries and keys are ``ln1(e)`` times the head's own W_Q and its group's W_K, biases included,
    divided by the root of d_head as in the network. ``e`` is the token's embedding, with
    ``after_mlp0`` plus what MLP 0 writes when it reads the embedding alone (the first MLP often
    completes the embedding; Wang et al. 2022, Gould et al. 2023). The layer norm is the layer's own
    and normalises that vector by its own size.

    Positions: learned position embeddings (GPT-2) are left out, so that scores say what the words
    do. Rotary ones (Llama) need a distance: the key stands ``offset`` tokens before the query.

    Args:
        model: from ``load_model``.
        layer: the head's layer.
        head: the query head; ``None`` for all heads of the layer.
        tokens: token ids of the queries, and of the keys too unless ``keys`` says otherwise.
        keys: token ids of the keys.
        offset: distance in tokens from key to query, at least 0; without rotary positions it
            changes nothing.
        after_mlp0: see above; for heads behind layer 0.

    Returns:
        Attention scores [query, key], dimensionless; [head, query, key] without a ``head``. A row
        may be shifted by a constant without any effect on attention.

    Raises:
        InputError: no such layer, head, token or offset; an encoder or Gemma 2; ``after_mlp0`` in
            layer 0.

    >>> import circuitkd as ckd
    >>> qk_circuit(ckd.load_model("tiny-student"), 1, 0, [5, 6, 7]).shape
    torch.Size([3, 3])
    """
    if not 0 <= offset < model.cfg.n_ctx:
        raise InputError(
            f"The offset is a distance to an earlier token, 0 to {model.cfg.n_ctx - 1}, "
            f"not {offset}."
        )
    heads, queries = _heads(model, layer, head), _ids(model, tokens)
    keyed = queries if keys is None else _ids(model, keys)
    replay = Replay(model, queries[:1].expand(1, offset + 1))
    attention = layer_attention(replay, layer, queries[:1].expand(1, offset + 1))
    read = [_read(replay, layer, ids, after_mlp0)[:, None] for ids in (queries, keyed)]
    # Queries stand at the last position of a prompt that is offset + 1 long, keys at the first.
    query = attention.project_all("q", attention.normed(read[0]))
    key = attention.normed(read[1]).expand(-1, offset + 1, -1)
    key = attention.project_all("k", key)[:, :, :1]
    key = attention.for_query_heads(key)
    scores = einsum(query, key, "q head one d, k head one d -> head q k") * attention.scale
    return scores[heads].float().cpu()


@torch.no_grad()
def ov_circuit(
    model: TransformerBridge,
    layer: int,
    head: int | None,
    tokens: Tokens,
    *,
    outputs: Tokens | None = None,
    after_mlp0: bool = False,
) -> Float[Tensor, "*head source output"]:
    """What a head adds to the logit of token j when it attends to token i alone.

    The head reads ``ln1(e)`` (see ``qk_circuit``; positions play no part) through its group's W_V,
    bias included, and its own W_O. The final layer norm is taken as linear: centring, where it
    centres, and gain, but neither its division by the stream's size, which depends on what all
    other nodes wrote, nor its bias. So the unit is logits times that size: compare rows of a head,
    not heads of different models.

    Args:
        model: from ``load_model``.
        layer: the head's layer.
        head: the query head; ``None`` for all heads of the layer.
        tokens: token ids that are attended to, and the outputs too unless ``outputs`` is given.
        outputs: token ids whose logits are wanted.
        after_mlp0: add to each embedding what MLP 0 makes of it alone; for heads behind layer 0.

    Returns:
        Scores [source, output]; [head, source, output] without a ``head``. Positive on the
        diagonal: the head copies. In a model of the GPT-2 type a row may be shifted by a constant
        without any effect on probabilities.

    Raises:
        InputError: no such layer, head or token; an encoder or Gemma 2; ``after_mlp0`` in layer 0.

    >>> import circuitkd as ckd
    >>> ov_circuit(ckd.load_model("tiny-student"), 1, None, [5, 6, 7]).shape
    torch.Size([8, 3, 3])
    """
    heads, sources = _heads(model, layer, head), _ids(model, tokens)
    wanted = sources if outputs is None else _ids(model, outputs)
    replay = Replay(model, sources[:1, None])
    attention = layer_attention(replay, layer, sources[:1, None])
    read = attention.normed(_read(replay, layer, sources, after_mlp0)[:, None])
    value = attention.for_query_heads(attention.project_all("v", read))
    writes = replay.head_writes(layer, rearrange(value, "token head one d -> token one head d"))
    scores = direct_logits(model, writes[:, 0], wanted)
    return rearrange(scores, "token head output -> head token output")[heads].float().cpu()


def layer_attention(replay: Replay, layer: int, tokens: Int[Tensor, "batch pos"]) -> LayerAttention:
    """The attention of a layer, for prompts as long as these."""
    stream = replay.embed(tokens[:1])
    for earlier in range(layer):
        stream = replay.block(earlier, stream)
    return LayerAttention(replay, layer, stream)


@torch.no_grad()
def direct_logits(
    model: TransformerBridge, writes: Float[Tensor, "*stack d_model"], outputs: Int[Tensor, "out"]
) -> Float[Tensor, "*stack out"]:
    """Direct effect of writes on logits, the final norm taken as linear and without its scale."""
    if not model.ln_final.uses_rms_norm:
        writes = writes - writes.mean(-1, keepdim=True)
    return (writes * norm_gain(model, model.ln_final)) @ model.W_U.detach()[
        :, outputs.to(writes.device)
    ]


def _read(
    replay: Replay, layer: int, tokens: Int[Tensor, "token"], after_mlp0: bool
) -> Float[Tensor, "token d_model"]:
    embedding = replay.model.W_E.detach()[tokens]
    if not after_mlp0:
        return embedding
    if layer == 0:
        raise InputError("Heads of layer 0 read the embedding before MLP 0: after_mlp0=False.")
    return embedding + replay.mlp(0, embedding[:, None])[:, 0]


def _heads(model: TransformerBridge, layer: int, head: int | None) -> int | slice:
    family = family_of_model(model)
    if not family.adds_up:
        raise InputError(
            f"{model_label(model)}: circuits from words to words are defined for decoders whose "
            f"residual stream is a sum, and {family.name} is none."
        )
    if not 0 <= layer < model.cfg.n_layers:
        raise InputError(f"{model_label(model)} has layers 0 to {model.cfg.n_layers - 1}.")
    if head is None:
        return slice(None)
    if not 0 <= head < model.cfg.n_heads:
        raise InputError(f"{model_label(model)} has heads 0 to {model.cfg.n_heads - 1}.")
    return head


def _ids(model: TransformerBridge, tokens: Tokens) -> Int[Tensor, "token"]:
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=device_of(model))
    if ids.ndim != 1 or len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= model.cfg.d_vocab:
        raise InputError(
            f"Tokens are a list of ids from 0 to {model.cfg.d_vocab - 1} for {model_label(model)}."
        )
    return ids
