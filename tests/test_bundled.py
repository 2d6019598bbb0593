"""The bundled pair, with plain transformers code: what it knows, and how it is stored."""

import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from circuitkd.tasks import TextPrompt, load_task, task_names

BUNDLED = Path(__file__).resolve().parent.parent / "circuitkd" / "bundled"
NAMES = ("tiny-teacher", "tiny-student")
LEAST = {"tiny-teacher": 0.99, "tiny-student": 0.97}
MEBIBYTE = 2**20

# Training used another seed; besides, only texts that training leaves out are asked.
SEED = 101


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(BUNDLED / request.param).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED / "tiny-teacher")


@cache
def held_out(task: str, n: int = 100) -> list[TextPrompt]:
    drawn, rng = load_task(task), np.random.default_rng(SEED)
    found = []
    while len(found) < n:
        prompt = drawn.draw(rng)
        if zlib.crc32(prompt.clean.text.encode()) % 8 == 0:
            found.append(prompt)
    return found


@torch.no_grad()
def last_logits(model: GPT2LMHeadModel, tokenizer, texts: list[str]) -> torch.Tensor:
    """The logits at the end of each text; texts of one length share a forward pass."""
    ids = [tokenizer(text).input_ids for text in texts]
    result = torch.empty(len(ids), model.config.vocab_size)
    for length in set(map(len, ids)):
        rows = [i for i, row in enumerate(ids) if len(row) == length]
        result[rows] = model(torch.tensor([ids[i] for i in rows])).logits[:, -1]
    return result


def accuracy(model: GPT2LMHeadModel, tokenizer, prompts: list[TextPrompt]) -> float:
    """The share of prompts whose most likely token, of all there are, is the answer."""
    logits = last_logits(model, tokenizer, [prompt.clean.text for prompt in prompts])
    best = [tokenizer.decode([token]) for token in logits.argmax(-1).tolist()]
    right = [
        word in (prompt.valid or (prompt.correct,))
        for word, prompt in zip(best, prompts, strict=True)
    ]
    return sum(right) / len(right)


@pytest.mark.parametrize("task", ["ioi", "numerals", "number_words", "months", "weekdays"])
def test_the_pair_does_its_tasks_on_prompts_it_never_saw(model, tokenizer, task: str):
    name = Path(model.name_or_path).name
    assert accuracy(model, tokenizer, held_out(task)) >= LEAST[name]


def test_the_pair_knows_later_years(model, tokenizer):
    assert accuracy(model, tokenizer, held_out("greater_than")) >= 0.95


def test_a_scrambled_sequence_has_no_sure_answer(model, tokenizer):
    """A model that only looked at the last number would be as sure here as of a clean prompt."""
    texts = [prompt.corrupted.text for prompt in held_out("numerals")]
    sure = last_logits(model, tokenizer, texts).softmax(-1).amax(-1)
    assert sure.mean() < 0.7


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_model_is_an_ordinary_small_directory(name: str):
    files = {path.name: path.stat().st_size for path in (BUNDLED / name).iterdir()}
    assert set(files) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 4 * MEBIBYTE


def test_the_models_have_the_shapes_they_are_described_with():
    shapes = {}
    for name in NAMES:
        config = AutoModelForCausalLM.from_pretrained(BUNDLED / name).config
        shapes[name] = (config.n_layer, config.n_head, config.n_embd)
    assert shapes == {"tiny-teacher": (4, 8, 128), "tiny-student": (2, 8, 128)}


def test_weights_load_as_float32(model):
    assert model.dtype == torch.float32


def test_both_models_have_the_same_tokenizer():
    first, second = ((BUNDLED / name / "tokenizer.json").read_text() for name in NAMES)
    assert first == second


@pytest.mark.parametrize("name", task_names())
def test_the_tokenizer_knows_every_shipped_task_and_gives_its_text_back(tokenizer, name: str):
    rng = np.random.default_rng(0)
    task = load_task(name)
    for variant in (None, *task.variants):
        for _ in range(5):
            prompt = task.draw(rng, variant=variant)
            for text in (prompt.clean.text + prompt.correct, prompt.corrupted.text):
                ids = tokenizer(text).input_ids
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids) == text


def test_the_tokenizer_is_space_sensitive_and_splits_years_in_two(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("Mary and Mary, 5 in 1732.").input_ids)
    assert pieces == ["Mary", "Ġand", "ĠMary", ",", "Ġ5", "Ġin", "Ġ17", "32", "."]


def test_the_tokenizer_adds_nothing_of_its_own(tokenizer):
    assert tokenizer.eos_token_id not in tokenizer("Mary").input_ids
    assert tokenizer("<|endoftext|>Mary").input_ids[0] == tokenizer.eos_token_id


def test_the_readme_has_a_line_for_every_task_and_variant():
    text = (BUNDLED / "README.md").read_text(encoding="utf-8")
    for name in task_names():
        section = text.split(f"| `{name}` |", 1)[1].split("\n| `", 1)[0]
        for variant in load_task(name).variants:
            assert f"| {variant} |" in section
