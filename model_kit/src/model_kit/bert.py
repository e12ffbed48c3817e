"""A BERT encoder in numpy for concatenated texts, without padding, so that texts do not affect each other's results.

Devlin et al. 2019, https://arxiv.org/abs/1810.04805, with the tensor names of its PyTorch form.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

Weights = Mapping[str, np.ndarray]

LAYER_NORM_EPSILON = np.float32(1e-12)
# erf(x) as x * P(x^2) / Q(x^2), highest power first, within 4e-7: the polynomials of XLA's float erf.
ERF_BOUND = np.float32(3.832506856900711)
ERF_P = np.float32(
    [0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084]
)
ERF_Q = np.float32(
    [
        -1.1791602954361697e-7,
        2.3547966471313185e-5,
        0.0010179625278914885,
        0.014070470171167667,
        0.11098505178285362,
        0.49746925110067538,
        1.0,
    ]
)


class Bert:
    """``weights`` are used in place, without a copy."""

    def __init__(self, weights: Weights, head_count: int) -> None:
        self._weights = weights
        self._head_count = head_count
        self._layer_count = sum(name.endswith(".output.dense.weight") for name in weights) // 2

    def states_of(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Token ids [n] of each text -> the last hidden states [n, width] of each, float32."""
        ends = np.cumsum([0, *(len(ids) for ids in texts)])
        spans = [slice(start, end) for start, end in pairwise(ends)]
        states = self._embedded(texts)
        for layer in range(self._layer_count):
            states = self._layer(f"encoder.layer.{layer}.", states, spans)
        return [states[span] for span in spans]

    def _embedded(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        weights = self._weights
        states = weights["embeddings.word_embeddings.weight"][np.concatenate(texts)]
        states += np.concatenate([weights["embeddings.position_embeddings.weight"][: len(ids)] for ids in texts])
        states += weights["embeddings.token_type_embeddings.weight"][0]
        return self._normed("embeddings.LayerNorm", states)

    def _layer(self, name: str, states: np.ndarray, spans: Sequence[slice]) -> np.ndarray:
        query, key, value = (self._dense(f"{name}attention.self.{part}", states) for part in ("query", "key", "value"))
        seen = np.empty_like(states)
        for span in spans:
            seen[span] = self._attention(query[span], key[span], value[span])
        states = self._normed(
            f"{name}attention.output.LayerNorm", self._dense(f"{name}attention.output.dense", seen) + states
        )
        inner = gelu(self._dense(f"{name}intermediate.dense", states))
        return self._normed(f"{name}output.LayerNorm", self._dense(f"{name}output.dense", inner) + states)

    def _attention(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        """[n, width] each -> [n, width]; every token sees every token of its text."""
        query, key, value = (
            part.reshape(len(part), self._head_count, -1).swapaxes(0, 1) for part in (query, key, value)
        )
        scores = query @ key.swapaxes(1, 2)
        scores /= np.sqrt(np.float32(query.shape[-1]))
        return (softmax(scores) @ value).swapaxes(0, 1).reshape(query.shape[1], -1)

    def _dense(self, name: str, states: np.ndarray) -> np.ndarray:
        result = states @ self._weights[f"{name}.weight"].T
        result += self._weights[f"{name}.bias"]
        return result

    def _normed(self, name: str, states: np.ndarray) -> np.ndarray:
        states = states - states.mean(axis=-1, keepdims=True)
        states /= np.sqrt(np.square(states).mean(axis=-1, keepdims=True) + LAYER_NORM_EPSILON)
        states *= self._weights[f"{name}.weight"]
        states += self._weights[f"{name}.bias"]
        return states


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def gelu(values: np.ndarray) -> np.ndarray:
    """The exact GELU: x * P(X <= x) for a standard normal X (https://arxiv.org/abs/1606.08415)."""
    result = erf(values * np.float32(np.sqrt(0.5)))
    result += 1
    result *= values
    result *= np.float32(0.5)
    return result


def erf(values: np.ndarray) -> np.ndarray:
    """The error function of float32 values, within 4e-7."""
    values = values.clip(-ERF_BOUND, ERF_BOUND)
    squares = np.square(values)
    values *= _polynomial(ERF_P, squares)
    values /= _polynomial(ERF_Q, squares)
    return values


def _polynomial(coefficients: np.ndarray, values: np.ndarray) -> np.ndarray:
    result = np.full_like(values, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= values
        result += coefficient
    return result
