"""Logits -> the next token."""

import numpy as np

_SEED_MASK = (1 << 64) - 1
_BLANK = (
    "198 199 200 201 202 221 257 261 276 289 339 342 374 417 487 504 652 658 694 710 745 836 "
    "901 1015 1025 1095 1190 1215 1250 1252 1266 1269 1339 1422 1456 1532 1555 1562 1569 1630 1785 1869 2016"
)
BLANK_IDS = np.array(_BLANK.split(), np.int32)
"""The tokens of white space alone."""


def generator_of(seed: int | None) -> np.random.Generator:
    """The random generator of one text; the same seed (any integer) gives the same text, None a random one."""
    return np.random.default_rng(None if seed is None else seed & _SEED_MASK)


def visible(logits: np.ndarray) -> np.ndarray:
    """The ``logits`` [vocabulary] without the tokens of white space."""
    logits = logits.copy()
    logits[BLANK_IDS[logits.size > BLANK_IDS]] = -np.inf
    return logits


def pick(logits: np.ndarray, temperature: float, chance: np.random.Generator) -> int:
    """Samples a token id from ``logits`` [vocabulary] divided by ``temperature``; at 0, returns the most likely id."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", under="ignore"):
        likelihoods = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    bounds = np.cumsum(likelihoods)
    return int(np.searchsorted(bounds, chance.random() * bounds[-1], side="right"))
