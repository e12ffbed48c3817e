"""Generation of a text: chunks, end, sampling and cancellation."""

from itertools import islice

import numpy as np
import pytest


@pytest.fixture(scope="module")
def generation(load):
    return load("tokens_generate", "tokens_generation")


@pytest.fixture(scope="module")
def wishes(load):
    return load("tokens_generate", "tokens_parameters").Wishes


@pytest.fixture
def chunks(generation, wishes, network):
    def chunks(prompt=(300, 301, 302), **wanted):
        prompt_ids = np.array(prompt, np.int32)
        return list(generation.generate(network, prompt_ids, wishes(**wanted), lambda: False))

    return chunks


class EndsAfter:
    """A network of three tokens that writes token 1 until it ends."""

    window, vocabulary, end_id = 8, 3, 0

    def __init__(self, tokens):
        self.tokens = tokens

    def read(self, token_ids):
        return None, self._logits()

    def advance(self, cache, token_id):
        return self._logits()

    def _logits(self):
        self.tokens -= 1
        return np.array([1.0, 0.0, 0.0] if self.tokens < 0 else [0.0, 1.0, 0.0], np.float32)


def token_ids(chunks):
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_the_seed_decides_the_text(chunks):
    """Temperature 0 needs none."""
    assert chunks(seed=7, max_tokens=20) == chunks(seed=7, max_tokens=20)
    assert len({tuple(token_ids(chunks(seed=seed, max_tokens=20, temperature=2.0))) for seed in (1, 2, -3)}) == 3
    assert chunks(temperature=0, max_tokens=20) == chunks(temperature=0, max_tokens=20, seed=5)


def test_each_chunk_holds_only_the_newest_tokens(chunks):
    one_by_one = chunks(seed=1, max_tokens=10)
    by_four = chunks(seed=1, max_tokens=10, chunk_tokens=4)
    assert {len(chunk.token_ids) for chunk in one_by_one} == {1}
    assert [len(chunk.token_ids) for chunk in by_four] == [4, 4, 2]
    assert token_ids(by_four) == token_ids(one_by_one)


def test_only_the_last_chunk_has_a_finish_reason(chunks, generation, wishes):
    """The end token stops the text, also at the limit."""
    assert [chunk.finish_reason for chunk in chunks(seed=1, max_tokens=3)] == [None, None, "length"]
    found = generation.generate(EndsAfter(2), np.array([1]), wishes(temperature=0), lambda: False)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in found] == [([1], None), ([1], None), ([0], "stop")]
    found = generation.generate(EndsAfter(1), np.array([1]), wishes(temperature=0, max_tokens=2), lambda: False)
    assert [chunk.finish_reason for chunk in found] == [None, "stop"]


def test_a_text_continues_beyond_the_window(chunks, network):
    assert len(token_ids(chunks(prompt=[5] * network.window, seed=3, max_tokens=30))) > 1


def test_cancellation_stops_before_the_next_token(generation, wishes, network):
    gone = []
    running = generation.generate(network, np.array([300]), wishes(seed=1), lambda: bool(gone))
    assert len(list(islice(running, 3))) == 3
    gone.append(True)
    assert list(running) == []
    assert list(generation.generate(object(), np.array([300]), wishes(), lambda: True)) == [], "the network is not read"


def test_a_long_prompt_is_cut_to_the_window(generation, network):
    prompt = np.arange(600, dtype=np.int32)
    assert list(generation.checked_prompt(prompt, network)) == list(range(88, 600))


@pytest.mark.parametrize("prompt", [[], [-1], [1, 2048]])
def test_a_prompt_outside_the_vocabulary_is_an_error(generation, network, prompt):
    with pytest.raises(Exception, match="TOKEN_IDS"):
        generation.checked_prompt(np.array(prompt, np.int32), network)
