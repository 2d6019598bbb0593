"""Fault 3: prompts got two BOS tokens, and logits were read one position late."""

import pytest
import torch
from random_models import random_gpt2
from tokenizers_for_tests import byte_level, llama_like, word_level, words_of
from transformers import PreTrainedTokenizerFast

from circuitkd import load_model, load_task, node_influence

TASK = load_task("weekdays")
WORDS = words_of(TASK)
TOKENIZERS = {
    "adds one": (lambda: byte_level(WORDS, adds_bos=True), 1),
    "Llama": (lambda: llama_like(WORDS), 1),
    "has one, adds none": (lambda: byte_level(WORDS), 0),
    "has none": (lambda: word_level(WORDS), 0),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_metric_is_read_after_the_last_token_of_the_text(kind: str) -> None:
    """Against the text alone, encoded afresh and run through the network as it was released."""
    make, by_itself = TOKENIZERS[kind]
    tokenizer = make()
    model = model_with(tokenizer)
    prompts = TASK.sample(model, n=8)
    group = prompts.groups[0]
    measured = node_influence(model, prompts).clean[group.index]
    for row, text in enumerate(group.texts):
        ids = [tokenizer.bos_token_id] * by_itself
        ids += tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model.original_model(torch.tensor([ids])).logits[0, -1]
        expected = logits[group.correct[row]] - logits[group.incorrect[row]]
        torch.testing.assert_close(measured[row], expected, atol=1e-4, rtol=0)


def model_with(tokenizer: PreTrainedTokenizerFast):
    network = random_gpt2(layers=2, vocabulary=len(tokenizer))
    return load_model(network, tokenizer=tokenizer)
