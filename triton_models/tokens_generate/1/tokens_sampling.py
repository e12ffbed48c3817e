"""Logits -> the next token."""

import numpy as np

_SEED_MASK = (1 << 64) - 1


def generator_of(seed: int | None) -> np.random.Generator:
    """The random generator of one text; the same seed (any integer) gives the same text, None a random one."""
    return np.random.default_rng(None if seed is None else seed & _SEED_MASK)


def pick(logits: np.ndarray, temperature: float, chance: np.random.Generator) -> int:
    """Samples a token id from ``logits`` [vocabulary] divided by ``temperature``; at 0, returns the most likely id."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", under="ignore"):
        likelihoods = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    bounds = np.cumsum(likelihoods)
    return int(np.searchsorted(bounds, chance.random() * bounds[-1], side="right"))
