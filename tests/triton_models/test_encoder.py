"""Converts prompts to token ids, and back with the vocabulary of the last step."""

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "triton_models/text_tokenize/1/tokenizer.json"
END_ID = 0


@pytest.fixture(scope="module")
def encoder(load):
    return load("text_tokenize", "text_encoder").Encoder(TOKENIZER)


@pytest.fixture(scope="module")
def vocabulary(load):
    return load("text_detokenize", "text_vocabulary").Vocabulary.from_file(TOKENIZER)


@pytest.mark.parametrize("text", ['The "for" statement\n   x = 1\n', "naïve: 5 €, 你好 🐍", "\0\r\t", "<|end|>", " "])
def test_prompts_survive_the_round_trip(encoder, vocabulary, text):
    assert vocabulary.bytes_of(encoder.ids_of(text.encode())) == text.encode()


def test_a_prompt_cannot_contain_the_end_token(encoder):
    assert END_ID not in encoder.ids_of(b"a <|end|> b")


def test_an_empty_prompt_is_the_start_of_a_text(encoder):
    ids = encoder.ids_of(b"")
    assert ids.tolist() == [END_ID]
    assert ids.dtype == np.int32


def test_only_the_end_of_a_long_prompt_is_used(encoder, vocabulary):
    assert vocabulary.bytes_of(encoder.ids_of(b"a" + b"x y " * 10_000)) == b"x y " * 4096


def test_invalid_utf_8_is_an_error(encoder):
    with pytest.raises(Exception, match="PROMPT is not UTF-8"):
        encoder.ids_of(b"\xff")


def test_every_byte_is_a_token(vocabulary):
    single = {vocabulary.bytes_of(np.array([token_id])) for token_id in range(2048)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_the_end_token_is_not_text(vocabulary):
    assert vocabulary.bytes_of(np.array([0], np.int32)) == b""


def test_a_character_may_span_several_tokens(vocabulary):
    euro = [next(i for i in range(2048) if vocabulary.bytes_of(np.array([i])) == bytes([b])) for b in "€".encode()]
    assert vocabulary.bytes_of(np.array(euro, np.int32)).decode() == "€"
    assert vocabulary.bytes_of(np.array(euro[:1], np.int32)) == b"\xe2"


def test_no_tokens_give_no_bytes(vocabulary):
    assert vocabulary.bytes_of(np.array([], np.int32)) == b""


@pytest.mark.parametrize("token_id", [-1, 2048])
def test_an_id_outside_the_vocabulary_is_an_error(vocabulary, token_id):
    with pytest.raises(Exception, match="NEWEST_IDS"):
        vocabulary.bytes_of(np.array([token_id], np.int32))


def test_both_steps_use_the_same_tokenizer():
    ours = ROOT / "triton_models/text_detokenize/1/tokenizer.json"
    assert ours.is_symlink()
    assert ours.resolve() == TOKENIZER.resolve()
