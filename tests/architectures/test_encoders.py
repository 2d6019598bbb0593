"""Encoders: what they read, and the whole pipeline on the bundled pair."""

import pytest
import torch
from prompt_samples import KINDS

import circuitkd as ckd
from circuitkd.circuits.attention import qk_circuit
from circuitkd.errors import InputError, VocabularyError
from circuitkd.prompts import Prompts, compared_positions, tokenised
from circuitkd.tasks import task_names

PAIR = ("tiny-teacher-mlm", "tiny-student-mlm")


def asked(name: str) -> Prompts:
    return ckd.load_task(name).sample(ckd.load_model(PAIR[0]), n=12)


@pytest.mark.parametrize("task", task_names())
def test_every_task_is_posed_with_one_mask_at_the_answer(task: str) -> None:
    model = ckd.load_model(PAIR[0])
    tokenizer = model.tokenizer
    for group in asked(task).groups:
        for ids in (*group.clean, *group.corrupted, *group.means):
            assert (ids == tokenizer.mask_token_id).nonzero().tolist() == [[group.answer]]
        for row, text in enumerate(group.texts):
            words = tokenizer.decode(group.clean[row]).replace(" ", "")
            assert words == f"[CLS]{text}[MASK].[SEP]".replace(" ", "")
        assert (group.positions["END"] == group.answer).all()


@pytest.mark.parametrize("task", ["numerals", "ioi", "weekdays"])
def test_the_bundled_pair_answers(task: str) -> None:
    for name in PAIR:
        model, prompts = ckd.load_model(name), asked(task)
        for group in prompts.groups:
            with torch.no_grad():
                logits = model(group.clean)[:, group.answer]
            assert (logits.argmax(-1) == group.correct).float().mean() > 0.9


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    with pytest.raises(VocabularyError, match="no mask token"):
        tokenised(ckd.load_task("ioi"), [KINDS["byte_level"]], 5, masked=[True])


def test_the_bundled_encoders_are_compared_at_all_positions() -> None:
    result = ckd.compare(*PAIR, "numerals", n=16, null_draws=0, draws=20)
    assert result.config["positions"] == "all"
    assert result.influences["teacher"].competent
    assert 0 < result.alignment.value < 1
    assert not any("encoder" in note for note in result.warnings)


def test_an_encoder_is_compared_with_itself_as_one() -> None:
    result = ckd.compare(PAIR[1], PAIR[1], "ioi", n=16, null_draws=0, draws=0)
    assert result.alignment.value == pytest.approx(1, abs=1e-5)


def test_an_encoder_against_a_decoder_is_compared_at_labels_with_a_warning() -> None:
    result = ckd.compare(PAIR[0], "tiny-student", "numerals", n=16, null_draws=0, draws=20)
    assert result.config["positions"] == "labelled"
    assert any("An encoder is compared with a decoder" in note for note in result.warnings)


def test_compared_positions_of_encoder_and_decoder_are_the_labels() -> None:
    models = ckd.load_model(PAIR[0]), ckd.load_model("tiny-student")
    pair = ckd.load_task("numerals").sample_pair(*models, n=8)
    ours, theirs = pair[0].groups[0], pair[1].groups[0]
    places = compared_positions(ours, theirs)
    assert int(places[0][0, -1]) == ours.answer
    assert int(places[1][0, -1]) == theirs.clean.shape[1] - 1


def test_roles_and_word_circuits_say_that_they_are_for_decoders() -> None:
    model = ckd.load_model(PAIR[1])
    roles = ckd.head_roles(model, ckd.load_task("ioi").sample(model, n=8))
    assert not roles.scores
    assert all("DistilBERT" in why for why in roles.skipped.values())
    with pytest.raises(InputError, match="decoders"):
        qk_circuit(model, 0, 0, [5, 6])
