"""A GPT-2 with hand-set weights that computes a logic gate of two bits.

The prompt is ``bit A, bit B, END``. In one layer, head 0 copies bit A to END, head 1 copies bit B,
head 2 copies bit A to where nobody reads it, head 3 does nothing; the MLP computes the gate of the
two copies. The logit difference is the gate's value: 1 for the clean bits 1 1, and 0 for the
corrupted bits 0 0. Under AND each head is needed; under OR either head can stand in for the other.
"""

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel

from circuitkd import load_model
from circuitkd.circuits.circuit import Circuit, Sizes
from circuitkd.prompts import PromptGroup, Prompts

Weights = dict[str, torch.nn.Parameter]

ZERO, ONE, END, YES, NO = range(5)

WIDTH, HEADS = 16, 4
LARGE = 200.0  # two constant dimensions of this size make all layer norms the same rescaling
PLUS, MINUS, BIT, PLACE_A, PLACE_B, AT_END, COPY_A, COPY_B, VALUE, UNREAD = range(10)
DUMP = 15  # takes the negative of every write, so that the mean over dimensions stays 0
STEEP = 8.0  # so steep that GELU is a ReLU to 1e-6 at the values that occur


def gate_model(gate: str) -> TransformerBridge:
    """``gate`` is "and" or "or"."""
    config = GPT2Config(
        n_layer=1,
        n_head=HEADS,
        n_embd=WIDTH,
        vocab_size=5,
        n_positions=3,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).eval()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
        _set_embeddings(weights)
        _set_heads(weights)
        _set_gate(weights, gate)
        weights["lm_head.weight"][YES, VALUE] = 1.0
    return load_model(model)


def gate_prompts(n: int = 4) -> Prompts:
    """Clean bits 1 1, corrupted 0 0; the right answer is YES."""
    clean = torch.tensor([[ONE, ONE, END]]).expand(n, -1).clone()
    corrupted = torch.tensor([[ZERO, ZERO, END]])
    group = PromptGroup(
        template=0,
        clean=clean,
        corrupted=corrupted.expand(n, -1).clone(),
        correct=torch.full((n,), YES),
        incorrect=torch.full((n,), NO),
        positions={"END": torch.full((n,), 2)},
        texts=("1 1",) * n,
        corrupted_texts=("0 0",) * n,
        index=torch.arange(n),
        means=corrupted.expand(64, -1).clone(),
    )
    return Prompts("gate", None, "logit_difference", None, 0, (group,))


def gate_circuit(model: TransformerBridge) -> Circuit:
    """The edges that the clean and the corrupted run differ in, on their way to the logits."""
    heads = (0, 1)
    edges = [f"input->a0.h{h}<v>" for h in heads] + [f"a0.h{h}->m0" for h in heads]
    return Circuit.build(Sizes.of(model), edges=[*edges, "m0->logits"])


def _set_embeddings(weights: Weights) -> None:
    tokens, places = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    tokens[:, PLUS], tokens[:, MINUS] = LARGE, -LARGE
    tokens[ONE, BIT], tokens[ONE, DUMP] = 1.0, -1.0
    for position, dimension in enumerate((PLACE_A, PLACE_B, AT_END)):
        places[position, dimension], places[position, DUMP] = 1.0, -1.0
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        weights[f"transformer.{norm}.weight"].fill_(LARGE * (2 / WIDTH) ** 0.5)


def _set_heads(weights: Weights) -> None:
    read, write = (weights[f"transformer.h.0.attn.{name}.weight"] for name in ("c_attn", "c_proj"))
    for head, (place, target) in enumerate(
        [(PLACE_A, COPY_A), (PLACE_B, COPY_B), (PLACE_A, UNREAD)]
    ):
        first = head * WIDTH // HEADS
        read[AT_END, first] = 10.0  # query
        read[place, WIDTH + first] = 10.0  # key
        read[BIT, 2 * WIDTH + first] = 1.0  # value
        write[first, target], write[first, DUMP] = 1.0, -1.0


def _set_gate(weights: Weights, gate: str) -> None:
    mlp = "transformer.h.0.mlp"
    read, bias = weights[f"{mlp}.c_fc.weight"], weights[f"{mlp}.c_fc.bias"]
    write = weights[f"{mlp}.c_proj.weight"]
    read[[COPY_A, COPY_B], 0] = STEEP
    if gate == "and":  # relu(a + b - 1)
        bias[0] = -STEEP
    else:  # relu(a + b) - relu(a + b - 1)
        read[[COPY_A, COPY_B], 1] = STEEP
        bias[1] = -STEEP
        write[1, VALUE], write[1, DUMP] = -1 / STEEP, 1 / STEEP
    write[0, VALUE], write[0, DUMP] = 1 / STEEP, -1 / STEEP
