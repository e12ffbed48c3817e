from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def vocabulary(load):
    vocabularies = load("text_detokenize", "text_vocabulary")
    return vocabularies.Vocabulary.from_file(ROOT / "triton_models/text_detokenize/1/tokenizer.json")


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
    assert ours.resolve() == (ROOT / "triton_models/text_tokenize/1/tokenizer.json").resolve()
