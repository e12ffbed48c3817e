"""One text, token by token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from model_kit.outcomes import InvalidInput
from tokens_parameters import Wishes
from tokens_sampling import generator_of, pick
from tokens_transformer import Network


@dataclass(frozen=True)
class Chunk:
    """The newest tokens only; ``finish_reason`` (``stop``: end token, ``length``: max_tokens) on the last chunk."""

    token_ids: list[int]
    finish_reason: str | None


def checked_prompt(token_ids: np.ndarray, network: Network) -> np.ndarray:
    """A copy of the newest window of a prompt [n].

    Raises:
        InvalidInput: no tokens, or an id that is not in the vocabulary.
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

    Once ``is_cancelled()`` it ends before the next token, with no finish reason. Not with an error: one that follows
    responses keeps Triton 2.51 from ever unloading the ensemble around this model.
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
    for left in reversed(range(wishes.max_tokens)):
        token_id = pick(logits, wishes.temperature, chance)
        finish_reason = _finish_reason(token_id == network.end_id, left)
        yield token_id, finish_reason
        if finish_reason or is_cancelled():
            return
        logits = network.advance(cache, token_id)


def _finish_reason(is_end: bool, left: int) -> str | None:
    if is_end:
        return "stop"
    return None if left else "length"
