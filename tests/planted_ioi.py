"""A hand-set GPT-2 that finds the indirect object as GPT-2 small does (Wang et al. 2022).

Prompts are ``BOS, two names, AND, the subject again, GAVE, TO``; the answer is the other name. In
layer 0 the duplicate-token head writes, where a token occurs again, which token it is. In layer 1
the S-inhibition head, at the end, finds that mark and carries the name over (K- and V-composition).
In layer 2 two name movers attend to names, but not to that one (Q-composition), and copy what they
find; each gives half the answer. Around them are noise heads:

- ``changing``: copies the earlier token of the same name, to where nobody reads;
- ``idle``: reads and writes what is the same in all prompts, where nobody reads;
- ``reader``: reads what the circuit writes, and writes where nobody reads;
- all other heads and the MLPs have random weights and write a little everywhere.

Corrupted prompts have three other names, none of them twice.
"""

import torch
from hand_set import HandSet, add_noise
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

PLANTED = {
    "duplicate token": Node.attention_head(0, 2),
    "S-inhibition": Node.attention_head(1, 1),
    "name mover": Node.attention_head(2, 0),
    "second name mover": Node.attention_head(2, 3),
}
NOISE = {
    "changing": Node.attention_head(0, 0),
    "idle": Node.attention_head(1, 3),
    "reader": Node.attention_head(2, 2),
}

NAMES = 8
BOS, AND, GAVE, TO = range(NAMES, NAMES + 4)
VOCABULARY = NAMES + 4
LENGTH = 7
SATURATED, SOFT = 14.0, 4.0
NOISE_SCALE = 0.01


def ioi_model(strength: float = SATURATED, *, seed: int = 0) -> TransformerBridge:
    """``strength`` is the score of what a head looks for; where it finds nothing, BOS has half.

    At ``SATURATED`` each softmax is flat: a small change of a query or a key changes nothing.
    """
    hand = HandSet(
        layers=3,
        heads=4,
        vocabulary=VOCABULARY,
        positions=LENGTH,
        d_mlp=8,
        d_head=NAMES + LENGTH + 1,
        spaces={
            "token": VOCABULARY,
            "place": LENGTH,
            "constant": 1,
            "duplicate": NAMES,
            "inhibited": NAMES,
            "answer": NAMES,
            "unread": NAMES,
        },
    )
    _set_embeddings(hand)
    _set_duplicate_token_head(hand, PLANTED["duplicate token"], strength, "duplicate")
    _set_duplicate_token_head(hand, NOISE["changing"], strength, "unread")
    _set_inhibition_head(hand, strength)
    _set_idle_head(hand)
    for role in ("name mover", "second name mover"):
        _set_name_mover(hand, PLANTED[role], strength, "answer")
    _set_name_mover(hand, NOISE["reader"], strength, "unread")
    add_noise(hand, scale=NOISE_SCALE, seed=seed)
    return hand.bridge()


def ioi_prompts(n: int = 16, *, seed: int = 0) -> Prompts:
    """Half the prompts name the subject first, half second."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator).split([n // 2, n - n // 2])
    groups = tuple(
        _group(template, index, generator) for template, index in enumerate(order) if len(index)
    )
    return Prompts("planted ioi", None, "logit_difference", None, seed, groups)


def _group(template: int, index: torch.Tensor, generator: torch.Generator) -> PromptGroup:
    def draw(rows: int, count: int) -> torch.Tensor:
        return torch.rand(rows, NAMES, generator=generator).argsort(1)[:, :count]

    def prompt(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
        words = [torch.full_like(first, word) for word in (BOS, AND, GAVE, TO)]
        return torch.stack([words[0], first, second, words[1], third, *words[2:]], 1)

    n = len(index)
    subject, other, *strangers = draw(n, 5).T
    pair = (subject, other) if template == 0 else (other, subject)
    clean, corrupted = prompt(*pair, subject), prompt(*strangers)
    return PromptGroup(
        template=template,
        clean=clean,
        corrupted=corrupted,
        correct=other,
        incorrect=subject,
        positions={
            "S1": torch.full((n,), 1 + template),
            "IO": torch.full((n,), 2 - template),
            "S2": torch.full((n,), 4),
            "END": torch.full((n,), LENGTH - 1),
        },
        texts=tuple(" ".join(map(str, row)) for row in clean.tolist()),
        corrupted_texts=tuple(" ".join(map(str, row)) for row in corrupted.tolist()),
        index=index,
        means=prompt(*draw(64, 3).T),
    )


def _set_embeddings(hand: HandSet) -> None:
    hand.tokens[:, hand["token"]] = torch.eye(VOCABULARY)
    hand.places[:, hand["place"]] = torch.eye(LENGTH)
    hand.places[:, hand["constant"]] = 1.0
    hand.unembedding[:NAMES, hand["answer"]] = torch.eye(NAMES)


def _names(hand: HandSet) -> slice:
    return slice(hand.at("token"), hand.at("token", NAMES))


def _set_duplicate_token_head(hand: HandSet, node: Node, strength: float, target: str) -> None:
    """Attends to the same name at another position, else to BOS."""
    head = hand.head(node.layer or 0, node.head or 0)
    itself, constant = slice(NAMES, NAMES + LENGTH), NAMES + LENGTH
    head.q[_names(hand), :NAMES] = hand.scores(strength) * torch.eye(NAMES)
    head.k[_names(hand), :NAMES] = torch.eye(NAMES)
    head.q[hand["place"], itself] = -hand.scores(strength) * torch.eye(LENGTH)
    head.k[hand["place"], itself] = torch.eye(LENGTH)
    head.q[hand.at("constant"), constant] = hand.scores(strength / 2)
    head.k[hand.at("token", BOS), constant] = 1.0
    head.v[_names(hand), :NAMES] = torch.eye(NAMES)
    head.out[:NAMES, hand[target]] = torch.eye(NAMES)


def _set_inhibition_head(hand: HandSet, strength: float) -> None:
    """Attends to where a duplicate was marked, else to BOS."""
    head = hand.head(1, PLANTED["S-inhibition"].head or 0)
    head.q[hand.at("constant"), NAMES] = hand.scores(strength)
    head.k[hand["duplicate"], NAMES] = 1.0
    head.k[hand.at("token", BOS), NAMES] = 0.5
    head.v[hand["duplicate"], :NAMES] = torch.eye(NAMES)
    head.out[:NAMES, hand["inhibited"]] = torch.eye(NAMES)


def _set_name_mover(hand: HandSet, node: Node, strength: float, target: str) -> None:
    """Attends to names that are not inhibited; copies half of what is there."""
    head = hand.head(node.layer or 0, node.head or 0)
    head.q[hand["inhibited"], :NAMES] = -hand.scores(strength) * torch.eye(NAMES)
    head.k[_names(hand), :NAMES] = torch.eye(NAMES)
    head.q[hand.at("constant"), NAMES] = hand.scores(strength)
    head.k[_names(hand), NAMES] = 1.0
    head.v[_names(hand), :NAMES] = torch.eye(NAMES)
    head.out[:NAMES, hand[target]] = 0.5 * torch.eye(NAMES)


def _set_idle_head(hand: HandSet) -> None:
    head = hand.head(1, NOISE["idle"].head or 0)
    head.v[hand["place"], :LENGTH] = torch.eye(LENGTH)
    head.out[:LENGTH, hand.at("unread") : hand.at("unread", LENGTH)] = torch.eye(LENGTH)
