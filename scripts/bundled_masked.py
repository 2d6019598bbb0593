"""The bundled encoders: their form of the documents, their networks, and how the student begins.

A document of ``bundled_corpus`` ends with its answer. An encoder reads it with a mask there, and a
full stop behind: ``[CLS] text [MASK] . [SEP]``. In some documents a few words are hidden as well,
and an unfinished one has no other mask.
"""

from collections.abc import Mapping, Sequence

import torch
from bundled_corpus import MASK, N_POSITIONS, PAD, Batch, Corpus, token_id
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedTokenizerFast,
)

HIDING = 0.3  # share of the documents in which words are hidden, besides the unfinished ones
HIDDEN = 0.15  # share of their words


class MaskedCorpus(Corpus):
    """The same documents, for an encoder."""

    def batch(self, size: int) -> Batch:
        rows, labels, answers = [], [], []
        for document in (self.document() for _ in range(size)):
            row, place = masked_ids(self.tokenizer, document.text, bool(document.answer))
            label = list(row)
            if place is not None:
                label[place] = token_id(self.tokenizer, document.answer)
            rows.append(row)
            labels.append(label)
            answers.append(-1 if place is None else place)
        width = max(map(len, rows))
        pad = token_id(self.tokenizer, PAD)
        ids, label = (
            torch.tensor([row + [pad] * (width - len(row)) for row in side])
            for side in (rows, labels)
        )
        real = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
        answer = torch.arange(width) == torch.tensor(answers)[:, None]
        hidden = self._hidden(real & ~answer, torch.tensor(answers) < 0)
        return Batch(
            ids=ids.masked_fill(hidden, token_id(self.tokenizer, MASK)),
            positions=self.positions(size, width),
            label=label,
            target=hidden | answer,
            answer=answer,
            real=real,
        )

    def _hidden(self, may: torch.Tensor, unfinished: torch.Tensor) -> torch.Tensor:
        """Which words are hidden; never the special tokens at both ends."""
        inner = may & may.roll(1, 1) & may.roll(-1, 1)
        inner[:, 0] = inner[:, -1] = False
        chosen = torch.from_numpy(self.rng.random(may.shape)) < HIDDEN
        rows = unfinished | torch.from_numpy(self.rng.random(len(may)) < HIDING)
        return chosen & inner & rows[:, None]


def masked_ids(
    tokenizer: PreTrainedTokenizerFast, text: str, answered: bool = True
) -> tuple[list[int], int | None]:
    """The tokens of a text as an encoder reads it, and the place of the mask, if it has one."""
    (begin, *words, end) = tokenizer(text)["input_ids"]
    stop, mask = token_id(tokenizer, "."), token_id(tokenizer, MASK)
    if not answered:
        return [begin, *words, stop, end], None
    return [begin, *words, mask, stop, end], len(words) + 1


def new_teacher(vocabulary: int, layers: int) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=N_POSITIONS,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def new_student(vocabulary: int, layers: int) -> DistilBertForMaskedLM:
    config = DistilBertConfig(
        vocab_size=vocabulary,
        dim=128,
        n_layers=layers,
        n_heads=4,
        hidden_dim=512,
        max_position_embeddings=N_POSITIONS,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return DistilBertForMaskedLM(config)


_LAYER_NAMES = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}


def masked_student_of(teacher: BertForMaskedLM, layers: Sequence[int]) -> DistilBertForMaskedLM:
    """A DistilBERT of the teacher's embeddings, head and these ``layers``.

    DistilBERT has no segment embeddings; the only one of the teacher goes into the positions.
    """
    student = new_student(teacher.config.vocab_size, len(layers))
    own, theirs = teacher.bert.embeddings, student.distilbert.embeddings
    theirs.word_embeddings.load_state_dict(own.word_embeddings.state_dict())
    theirs.LayerNorm.load_state_dict(own.LayerNorm.state_dict())
    with torch.no_grad():
        segment = own.token_type_embeddings.weight[0]
        positions = own.position_embeddings.weight + segment
        theirs.position_embeddings.load_state_dict({"weight": positions})
        student.vocab_projector.bias = torch.nn.Parameter(teacher.cls.predictions.bias.clone())
    transform = teacher.cls.predictions.transform
    student.vocab_transform.load_state_dict(transform.dense.state_dict())
    student.vocab_layer_norm.load_state_dict(transform.LayerNorm.state_dict())
    for place, layer in enumerate(layers):
        student.distilbert.transformer.layer[place].load_state_dict(
            _renamed(teacher.bert.encoder.layer[layer].state_dict())
        )
    return student


def _renamed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in state.items():
        part, kind = name.rsplit(".", 1)
        found[f"{_LAYER_NAMES[part]}.{kind}"] = value
    return found
