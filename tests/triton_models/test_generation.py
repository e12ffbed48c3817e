"""Prompts become token ids and back; generation: parameters, sampling, chunks, end, cancellation, threads, logits."""

import threading
import time
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tokens_generation as generation
import tokens_parameters as parameters
import tokens_sampling as sampling
from text_encoder import Encoder
from text_vocabulary import Vocabulary
from tokens_cancellation import Cancellations
from tokens_parameters import Wishes
from tokens_transformer import Network
from tokens_workers import Workers

ROOT = Path(__file__).resolve().parents[2]
TORCH = np.load(ROOT / "tests/triton_models/fixtures/torch_logits.npz")
TOKENIZER = ROOT / "triton_models/text_tokenize/1/tokenizer.json"
END_ID = 0
encoder, vocabulary = Encoder(TOKENIZER), Vocabulary.from_file(TOKENIZER)


@pytest.fixture(scope="module")
def network():
    """The text model with its committed weights."""
    return Network.from_file(ROOT / "triton_models/tokens_generate/1/weights.npz")


@pytest.fixture
def chunks(network):
    def chunks(prompt=(300, 301, 302), **wanted):
        prompt_ids = np.array(prompt, np.int32)
        return list(generation.generate(network, prompt_ids, Wishes(**wanted), lambda: False))

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


def test_a_text_does_not_begin_with_white_space(chunks):
    """Not even after a prompt that most often ends its line."""
    prompt = encoder.ids_of(b"The with statement")
    drawn = {token_ids(chunks(prompt, seed=seed, max_tokens=1))[0] for seed in range(30)}
    assert len(drawn) > 3
    assert not drawn & set(sampling.BLANK_IDS)
    blank = [each for each in range(2048) if (text := vocabulary.bytes_of(np.array([each]))) and not text.strip()]
    assert list(sampling.BLANK_IDS) == blank


def test_a_pause_slows_each_token(chunks):
    started = time.monotonic()
    assert chunks(seed=1, max_tokens=4, pause_ms=50) == chunks(seed=1, max_tokens=4)
    assert time.monotonic() - started >= 0.15


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


def test_only_the_last_chunk_has_a_finish_reason(chunks):
    """The end token stops the text, also at the limit."""
    assert [chunk.finish_reason for chunk in chunks(seed=1, max_tokens=3)] == [None, None, "length"]
    found = generation.generate(EndsAfter(2), np.array([1]), Wishes(temperature=0), lambda: False)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in found] == [([1], None), ([1], None), ([0], "stop")]
    found = generation.generate(EndsAfter(1), np.array([1]), Wishes(temperature=0, max_tokens=2), lambda: False)
    assert [chunk.finish_reason for chunk in found] == [None, "stop"]


def test_a_text_continues_beyond_the_window(chunks, network):
    """A long prompt is cut to the window."""
    prompt = np.arange(600, dtype=np.int32)
    assert list(generation.checked_prompt(prompt, network)) == list(range(88, 600))
    assert len(token_ids(chunks(prompt=[5] * network.window, seed=3, max_tokens=30))) > 1


def test_cancellation_stops_before_the_next_token(network):
    gone = []
    running = generation.generate(network, np.array([300]), Wishes(seed=1), lambda: bool(gone))
    assert len(list(islice(running, 3))) == 3
    gone.append(True)
    assert list(running) == []
    assert list(generation.generate(object(), np.array([300]), Wishes(), lambda: True)) == [], "the network is not read"


@pytest.mark.parametrize("prompt", [[], [-1], [1, 2048]])
def test_a_prompt_outside_the_vocabulary_is_an_error(network, prompt):
    with pytest.raises(Exception, match="TOKEN_IDS"):
        generation.checked_prompt(np.array(prompt, np.int32), network)


def test_known_parameters_are_read_and_others_ignored():
    assert parameters.wishes_of({}) == Wishes(max_tokens=64, temperature=0.8, seed=None, chunk_tokens=1, pause_ms=0)
    sent = {"max_tokens": 512, "temperature": 0, "seed": -4, "chunk_tokens": 64, "pause_ms": 200, "traceparent": "00-1"}
    assert parameters.wishes_of(sent) == Wishes(max_tokens=512, temperature=0.0, seed=-4, chunk_tokens=64, pause_ms=200)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 513),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "8"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", False),
        ("seed", 1.0),
        ("seed", "secret"),
        ("chunk_tokens", 0),
        ("chunk_tokens", 65),
        ("pause_ms", 201),
    ],
)
def test_the_error_names_the_parameter_but_not_its_value(name, value):
    with pytest.raises(Exception, match=f"^{name} must be") as caught:
        parameters.wishes_of({name: value})
    assert type(caught.value).__name__ == "InvalidInput"
    assert "secret" not in str(caught.value)


LOGITS = np.log(np.array([0.1, 0.6, 0.3], np.float32))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_temperature_flattens_the_distribution(temperature):
    chance = sampling.generator_of(0)
    drawn = [sampling.pick(LOGITS, temperature, chance) for _ in range(4000)]
    expected = np.array([0.1, 0.6, 0.3]) ** (1 / temperature)
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 4000, expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize("temperature", [0, 1e-300, 5e-324])
def test_a_very_low_temperature_picks_the_most_likely_token(temperature):
    assert sampling.pick(LOGITS, temperature, sampling.generator_of(1)) == 1


def test_any_integer_is_a_seed():
    for seed in (0, -1, 2**63 - 1, -(2**63), 2**80):
        assert sampling.generator_of(seed).random() == sampling.generator_of(seed).random()
    assert sampling.generator_of(None).random() != sampling.generator_of(None).random()


@pytest.fixture
def clock():
    return Mock(return_value=1000.0)


@pytest.fixture
def cancellations(clock):
    return Cancellations(clock)


def test_only_the_named_request_is_cancelled(cancellations):
    mine, other = cancellations.watch("mine"), cancellations.watch("other")
    cancellations.cancel("mine")
    assert mine.is_set()
    assert not other.is_set()


def test_an_early_cancellation_is_kept_for_a_minute(cancellations, clock):
    cancellations.cancel("early")
    clock.return_value += 59
    assert cancellations.watch("early").is_set()
    clock.return_value += 1
    assert not cancellations.watch("early").is_set()


def test_a_waiting_request_stays_cancelled(cancellations, clock):
    waiting = cancellations.watch("waiting")
    cancellations.cancel("waiting")
    clock.return_value += 600
    cancellations.cancel("another")
    assert waiting.is_set()


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_an_invalid_request_id_is_an_error(cancellations, request_id):
    with pytest.raises(Exception, match="CANCEL must be"):
        cancellations.cancel(request_id)


def test_excess_tasks_wait_in_order():
    workers, gate, ran = Workers(1), threading.Event(), []
    workers.submit(gate.wait)
    for number in range(5):
        workers.submit(lambda number=number: ran.append(number))
    assert ran == []
    gate.set()
    workers.close(5.0)
    assert ran == [0, 1, 2, 3, 4]


def test_each_thread_runs_one_task():
    workers, together = Workers(3), threading.Barrier(3, timeout=5)
    for _ in range(3):
        workers.submit(together.wait)
    workers.close(5.0)
    assert not together.broken


def test_close_waits_for_a_limited_time():
    workers, gate = Workers(1), threading.Event()
    workers.submit(gate.wait)
    workers.close(0.05)
    gate.set()


def logits_after_each(network, token_ids, read):
    """Reads the first ``read`` tokens in one pass, the others one by one. Returns logits [n - read + 1, vocabulary]."""
    cache, logits = network.read(token_ids[:read])
    return np.stack([logits, *(network.advance(cache, int(token_id)) for token_id in token_ids[read:])])


@pytest.mark.parametrize(("text", "read"), [("short", -2), ("short", 1), ("long", 512)])
def test_logits_equal_those_of_pytorch(network, text, read):
    """In one pass except for two tokens, one by one, and once the window slides."""
    ids = TORCH[f"{text}_ids"]
    found = logits_after_each(network, ids, read % len(ids))
    np.testing.assert_allclose(found[-3:], TORCH[f"{text}_logits"], atol=1e-3)


def test_caches_of_two_texts_are_independent(network):
    ids = TORCH["short_ids"]
    cache, _ = network.read(ids[:5])
    other, _ = network.read(ids[5:])
    expected = network.read(np.append(ids[:5], 7))[1]
    network.advance(other, 9)
    np.testing.assert_allclose(network.advance(cache, 7), expected, atol=1e-3)


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
