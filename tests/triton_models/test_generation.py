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


def test_the_same_seed_gives_the_same_text(chunks):
    assert chunks(seed=7, max_tokens=20) == chunks(seed=7, max_tokens=20)


def test_another_seed_gives_another_text(chunks):
    assert len({tuple(token_ids(chunks(seed=seed, max_tokens=20, temperature=2.0))) for seed in (1, 2, -3)}) == 3


def test_temperature_zero_needs_no_seed(chunks):
    assert chunks(temperature=0, max_tokens=20) == chunks(temperature=0, max_tokens=20, seed=5)


def test_each_chunk_holds_only_the_newest_tokens(chunks):
    one_by_one = chunks(seed=1, max_tokens=10)
    by_four = chunks(seed=1, max_tokens=10, chunk_tokens=4)
    assert {len(chunk.token_ids) for chunk in one_by_one} == {1}
    assert [len(chunk.token_ids) for chunk in by_four] == [4, 4, 2]
    assert token_ids(by_four) == token_ids(one_by_one)


def test_only_the_last_chunk_has_a_finish_reason(chunks):
    assert [chunk.finish_reason for chunk in chunks(seed=1, max_tokens=3)] == [None, None, "length"]


def test_the_end_token_stops_the_text(generation, wishes):
    found = generation.generate(EndsAfter(2), np.array([1]), wishes(temperature=0), lambda: False)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in found] == [([1], None), ([1], None), ([0], "stop")]


def test_an_end_token_at_the_limit_is_a_stop(generation, wishes):
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


def test_an_early_cancellation_generates_no_tokens(generation, wishes):
    class Unread:
        pass

    assert list(generation.generate(Unread(), np.array([300]), wishes(), lambda: True)) == []


def test_a_long_prompt_is_cut_to_the_window(generation, network):
    prompt = np.arange(600, dtype=np.int32)
    assert list(generation.checked_prompt(prompt, network)) == list(range(88, 600))


@pytest.mark.parametrize("prompt", [[], [-1], [1, 2048]])
def test_a_prompt_outside_the_vocabulary_is_an_error(generation, network, prompt):
    with pytest.raises(Exception, match="TOKEN_IDS"):
        generation.checked_prompt(np.array(prompt, np.int32), network)
