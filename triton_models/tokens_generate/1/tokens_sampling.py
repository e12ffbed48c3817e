"""Logits -> the next token."""

import numpy as np

_SEED_MASK = (1 << 64) - 1


def generator_of(seed: int | None) -> np.random.Generator:
    """The source of chance of one text; the same seed (any integer) gives the same text, None another every time."""
    return np.random.default_rng(None if seed is None else seed & _SEED_MASK)


def pick(logits: np.ndarray, temperature: float, chance: np.random.Generator) -> int:
    """A token id drawn from ``logits`` [vocabulary] divided by ``temperature``; at 0 the most likely one."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", under="ignore"):
        likelihoods = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    bounds = np.cumsum(likelihoods)
    return int(np.searchsorted(bounds, chance.random() * bounds[-1], side="right"))
