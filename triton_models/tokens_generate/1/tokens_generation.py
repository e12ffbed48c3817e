"""Generates one text, token by token."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from model_kit.outcomes import InvalidInput
from tokens_parameters import Wishes
from tokens_sampling import BLANK_IDS, generator_of, pick, visible
from tokens_transformer import Network


@dataclass(frozen=True)
class Chunk:
    """New tokens; the last chunk has a ``finish_reason`` (``stop``: end token, ``length``: max_tokens)."""

    token_ids: list[int]
    finish_reason: str | None


def checked_prompt(token_ids: np.ndarray, network: Network) -> np.ndarray:
    """Returns a copy of the last window of a prompt [n].

    Raises:
        InvalidInput: If there are no tokens, or an id is not in the vocabulary.
    """
    if not token_ids.size:
        raise InvalidInput("TOKEN_IDS is empty")
    if not 0 <= token_ids.min() <= token_ids.max() < network.vocabulary:
        raise InvalidInput("TOKEN_IDS holds an id outside the vocabulary")
    return token_ids[-network.window :].copy()


def generate(
    network: Network, prompt_ids: np.ndarray, wishes: Wishes, is_cancelled: Callable[[], bool]
) -> Iterator[Chunk]:
    """Continue ``prompt_ids`` [n], 0 < n <= window.

    After ``is_cancelled()`` it ends before the next token, without a finish reason. It does not raise an error, because
    after an error that follows responses Triton 2.51 can never unload the ensemble of this model.
    """
    newest: list[int] = []
    for token_id, finish_reason in _tokens(network, prompt_ids, wishes, is_cancelled):
        newest.append(token_id)
        if finish_reason or len(newest) == wishes.chunk_tokens:
            yield Chunk(newest, finish_reason)
            newest = []


def _tokens(
    network: Network, prompt_ids: np.ndarray, wishes: Wishes, is_cancelled: Callable[[], bool]
) -> Iterator[tuple[int, str | None]]:
    chance = generator_of(wishes.seed)
    if is_cancelled():
        return
    cache, logits = network.read(prompt_ids)
    token_id = pick(logits, wishes.temperature, chance)
    if token_id in BLANK_IDS:  # The text begins after the line break.
        token_id = pick(visible(network.advance(cache, token_id)), wishes.temperature, chance)
    for left in reversed(range(wishes.max_tokens)):
        finish_reason = _finish_reason(token_id == network.end_id, left)
        yield token_id, finish_reason
        if finish_reason or is_cancelled():
            return
        time.sleep(wishes.pause_ms / 1000)
        token_id = pick(network.advance(cache, token_id), wishes.temperature, chance)


def _finish_reason(is_end: bool, left: int) -> str | None:
    if is_end:
        return "stop"
    return None if left else "length"
