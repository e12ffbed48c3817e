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
