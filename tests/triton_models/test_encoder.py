"""Converts prompts to token ids, and back with the vocabulary of the last step."""

from pathlib import Path

import numpy as np
import pytest
from text_encoder import Encoder
from text_vocabulary import Vocabulary

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "triton_models/text_tokenize/1/tokenizer.json"
END_ID = 0
encoder, vocabulary = Encoder(TOKENIZER), Vocabulary.from_file(TOKENIZER)


@pytest.mark.parametrize("text", ['The "for" statement\n   x = 1\n', "naïve: 5 €, 你好 🐍", "\0\r\t", "<|end|>", " "])
def test_prompts_survive_the_round_trip(text):
    assert vocabulary.bytes_of(encoder.ids_of(text.encode())) == text.encode()


def test_the_end_token_begins_a_text_and_no_prompt_contains_it():
    assert END_ID not in encoder.ids_of(b"a <|end|> b")
    ids = encoder.ids_of(b"")
    assert ids.tolist() == [END_ID]
    assert ids.dtype == np.int32


def test_only_the_end_of_a_long_prompt_is_used():
    assert vocabulary.bytes_of(encoder.ids_of(b"a" + b"x y " * 10_000)) == b"x y " * 4096


def test_invalid_utf_8_is_an_error():
    with pytest.raises(Exception, match="PROMPT is not UTF-8"):
        encoder.ids_of(b"\xff")


def test_every_byte_is_a_token():
    single = {vocabulary.bytes_of(np.array([token_id])) for token_id in range(2048)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_a_character_may_span_several_tokens():
    euro = [next(i for i in range(2048) if vocabulary.bytes_of(np.array([i])) == bytes([b])) for b in "€".encode()]
    assert vocabulary.bytes_of(np.array(euro, np.int32)).decode() == "€"
    assert vocabulary.bytes_of(np.array(euro[:1], np.int32)) == b"\xe2"
    assert vocabulary.bytes_of(np.array([END_ID], np.int32)) == b"", "the end token is not text"
    assert vocabulary.bytes_of(np.array([], np.int32)) == b""


@pytest.mark.parametrize("token_id", [-1, 2048])
def test_an_id_outside_the_vocabulary_is_an_error(token_id):
    with pytest.raises(Exception, match="NEWEST_IDS"):
        vocabulary.bytes_of(np.array([token_id], np.int32))


def test_both_steps_use_the_same_tokenizer():
    ours = ROOT / "triton_models/text_detokenize/1/tokenizer.json"
    assert ours.is_symlink()
    assert ours.resolve() == TOKENIZER.resolve()
