"""A hand-set GPT-2 with an induction circuit: previous-token head, induction head, an MLP.

Prompts are ``BOS … A B … A``, and the answer is B. In layer 0 the previous-token head writes, at
every position, the token before it. In layer 1 the induction head asks for the position whose
previous token is the present one (K-composition), and copies the token there; finds it none, it
attends to BOS and copies nothing. The last MLP turns the copy into an answer. Around them are noise
heads:

- ``changing``: copies the previous token too, to where nobody reads;
- ``idle``: reads and writes what is the same in all prompts, where nobody reads;
- ``reader``: reads what the circuit writes, and writes where nobody reads;
- all other heads, and the first MLP, have random weights and write a little everywhere.

Corrupted prompts have no repeated token, and share none with the clean one.
"""

import torch
from hand_set import HandSet, add_noise
from transformer_lens.model_bridge import TransformerBridge

from circuitkd.nodes import Node
from circuitkd.prompts import PromptGroup, Prompts

PLANTED = {
    "previous token": Node.attention_head(0, 1),
    "induction": Node.attention_head(1, 2),
    "decoder": Node.mlp(1),
}
NOISE = {
    "changing": Node.attention_head(0, 3),
    "idle": Node.attention_head(0, 0),
    "reader": Node.attention_head(1, 0),
}

WORDS, BOS = 16, 16
LENGTH = 9
SATURATED, SOFT = 40.0, 6.0
NOISE_SCALE = 0.01


def induction_model(strength: float = SATURATED, *, seed: int = 0) -> TransformerBridge:
    """``strength`` is the induction head's score of a match; that of BOS is half as large.

    At ``SATURATED`` the softmax is flat: a small change of a query or a key changes nothing.
    """
    hand = HandSet(
        layers=2,
        heads=4,
        vocabulary=WORDS + 1,
        positions=LENGTH,
        d_mlp=WORDS,
        spaces={
            "word": WORDS,
            "bos": 1,
            "place": LENGTH,
            "constant": 1,
            "previous": WORDS,
            "copy": WORDS,
            "answer": WORDS,
            "unread": WORDS,
        },
    )
    _set_embeddings(hand)
    _set_previous_token_head(hand, PLANTED["previous token"], "previous")
    _set_previous_token_head(hand, NOISE["changing"], "unread")
    _set_idle_head(hand)
    _set_induction_head(hand, PLANTED["induction"], strength, "copy")
    _set_induction_head(hand, NOISE["reader"], strength, "unread")
    decoder = hand.mlp(1)
    decoder.read[hand["copy"]] = torch.eye(WORDS)
    decoder.write[:, hand["answer"]] = torch.eye(WORDS)
    add_noise(hand, scale=NOISE_SCALE, seed=seed)
    return hand.bridge()


def induction_prompts(n: int = 16, *, seed: int = 0) -> Prompts:
    """The repeated token lies anywhere; the wrong answer is another token of the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, count: int) -> torch.Tensor:
        return torch.rand(rows, WORDS, generator=generator).argsort(1)[:, :count]

    def with_bos(words: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full((len(words), 1), BOS), words], 1)

    rows, inner = torch.arange(n), LENGTH - 2
    words = draw(n, 2 * LENGTH - 3)  # distinct: inner for the clean prompt, the rest corrupted
    clean, corrupted = with_bos(words[:, :inner]), with_bos(words[:, inner:])
    first = torch.randint(1, inner, (n,), generator=generator)
    clean = torch.cat([clean, clean[rows, first][:, None]], 1)
    correct = first + 1
    incorrect = torch.where(correct == inner, first - 1, inner)
    incorrect = torch.where(incorrect == 0, inner - 1, incorrect)
    group = PromptGroup(
        template=0,
        clean=clean,
        corrupted=corrupted,
        correct=clean[rows, correct],
        incorrect=clean[rows, incorrect],
        positions={"A1": first, "B": correct, "END": torch.full((n,), LENGTH - 1)},
        texts=tuple(" ".join(map(str, row)) for row in clean.tolist()),
        corrupted_texts=tuple(" ".join(map(str, row)) for row in corrupted.tolist()),
        index=rows,
        means=with_bos(draw(64, LENGTH - 1)),
    )
    return Prompts("induction", None, "logit_difference", None, seed, (group,))


def _set_embeddings(hand: HandSet) -> None:
    hand.tokens[:WORDS, hand["word"]] = torch.eye(WORDS)
    hand.tokens[BOS, hand["bos"]] = 1.0
    hand.places[:, hand["place"]] = torch.eye(LENGTH)
    hand.places[:, hand["constant"]] = 1.0
    hand.unembedding[:WORDS, hand["answer"]] = torch.eye(WORDS)


def _set_previous_token_head(hand: HandSet, node: Node, target: str) -> None:
    """Attends by position alone, always sharply; position 0 attends to itself."""
    head = hand.head(node.layer or 0, node.head or 0)
    place = hand["place"]
    head.q[place, :LENGTH] = hand.scores(SATURATED) * torch.eye(LENGTH)
    head.k[place, :LENGTH] = torch.eye(LENGTH).roll(1, dims=1)  # position p answers to p + 1
    head.v[hand["word"], :WORDS] = torch.eye(WORDS)
    head.out[:WORDS, hand[target]] = torch.eye(WORDS)


def _set_idle_head(hand: HandSet) -> None:
    head = hand.head(0, NOISE["idle"].head or 0)
    head.v[hand["place"], :LENGTH] = torch.eye(LENGTH)
    head.out[:LENGTH, hand.at("unread") : hand.at("unread", LENGTH)] = torch.eye(LENGTH)


def _set_induction_head(hand: HandSet, node: Node, strength: float, target: str) -> None:
    head = hand.head(1, node.head or 0)
    head.q[hand["word"], :WORDS] = hand.scores(strength) * torch.eye(WORDS)
    head.k[hand["previous"], :WORDS] = torch.eye(WORDS)
    head.q[hand.at("constant"), WORDS] = hand.scores(strength / 2)
    head.k[hand.at("bos"), WORDS] = 1.0
    head.v[hand["word"], :WORDS] = torch.eye(WORDS)
    head.out[:WORDS, hand[target]] = torch.eye(WORDS)
