"""Checks the request parameters of a generation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_kit.outcomes import InvalidInput


@dataclass(frozen=True)
class Wishes:
    """The options of one text; a part has at most ``chunk_tokens`` tokens. ``pause_ms``: after each token."""

    max_tokens: int = 64
    temperature: float = 0.8
    seed: int | None = None
    chunk_tokens: int = 1
    pause_ms: int = 0


def wishes_of(parameters: Mapping[str, Any]) -> Wishes:
    """Reads the parameters of a request, and ignores others, such as the trace context.

    Raises:
        InvalidInput: If a parameter has the wrong type or is out of range; the text has its name, but not its value.
    """
    return Wishes(
        max_tokens=_integer(parameters, "max_tokens", Wishes.max_tokens, 1, 512),
        temperature=_number(parameters, "temperature", Wishes.temperature, 0, 2),
        seed=_seed(parameters),
        chunk_tokens=_integer(parameters, "chunk_tokens", Wishes.chunk_tokens, 1, 64),
        pause_ms=_integer(parameters, "pause_ms", Wishes.pause_ms, 0, 200),
    )


def _integer(parameters: Mapping[str, Any], name: str, default: int, minimum: int, maximum: int) -> int:
    value = parameters.get(name, default)
    if type(value) is not int or not minimum <= value <= maximum:
        raise InvalidInput(f"{name} must be an integer from {minimum} to {maximum}")
    return value


def _number(parameters: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    value = parameters.get(name, default)
    if type(value) not in (int, float) or not minimum <= value <= maximum:
        raise InvalidInput(f"{name} must be a number from {minimum} to {maximum}")
    return float(value)


def _seed(parameters: Mapping[str, Any]) -> int | None:
    seed = parameters.get("seed")
    if seed is not None and type(seed) is not int:
        raise InvalidInput("seed must be an integer")
    return seed
