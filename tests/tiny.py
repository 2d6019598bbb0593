"""Untrained models with a tokenizer for the shipped tasks' words, saved as directories."""

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from circuitkd.tasks import Task, load_task


def save_tiny_model(
    directory: Path, *, layers: int = 2, heads: int = 2, seed: int = 0, tasks: tuple[str, ...] = ()
) -> Path:
    """A random GPT-2 of width 16 in ``directory``; its vocabulary is that of ``tasks``."""
    tokenizer = word_tokenizer([load_task(name) for name in tasks or ("ioi", "numerals")])
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=16,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    network = GPT2LMHeadModel(config)
    for parameter in network.parameters():
        # At the usual scale of 0.02 nothing in an untrained model has any effect.
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def word_tokenizer(tasks: list[Task]) -> PreTrainedTokenizerFast:
    """One token a word, for all words of ``tasks`` and their variants."""
    texts = [
        text
        for task in tasks
        for variant in (None, *task.variants)
        for text in _texts(task.with_variant(variant))
    ]
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)})
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def _texts(task: Task) -> list[str]:
    lists = [word for words in task.words().values() for word in words]
    templates = [re.sub(r"\{[^}]*\}", " ", template.text) for template in task.templates]
    return [*lists, *templates]
