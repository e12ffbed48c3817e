"""A decoder-only transformer in numpy, float32, with a key-value cache; equivalent to ``training/network.py``.

All requests share one immutable network; the state of a text is in its ``Cache``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ROTARY_BASE = 10_000.0
_NORM_EPSILON = np.float32(1e-5)
_BLOCK_ARRAYS = ("attention_norm", "attention_in", "attention_out", "mlp_norm", "mlp_in", "mlp_out")


@dataclass(frozen=True)
class _Block:
    """Gains [width]; matrices [in, out], the attention's input giving query, key and value side by side."""

    attention_norm: np.ndarray
    attention_in: np.ndarray
    attention_out: np.ndarray
    mlp_norm: np.ndarray
    mlp_in: np.ndarray
    mlp_out: np.ndarray


class Cache:
    """The last ``window`` keys and values of one text, [block, heads, window, head width] each, as a ring buffer.

    Keys are rotated by their position before they are stored, so their order in the ring does not matter.
    """

    def __init__(self, blocks: int, heads: int, window: int, head_width: int) -> None:
        self.length = 0
        self.window = window
        self._keys = np.empty((blocks, heads, window, head_width), np.float32)
        self._values = np.empty_like(self._keys)

    def put(self, block: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stores [heads, n, head width] of new positions; returns all keys and values of this block for them."""
        count = keys.shape[1]
        slot = self.length % self.window
        self._keys[block, :, slot : slot + count] = keys
        self._values[block, :, slot : slot + count] = values
        seen = min(self.length + count, self.window)
        return self._keys[block, :, :seen], self._values[block, :, :seen]


class Network:
    """The weights, with one method for a prompt and one for a single token."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        """``arrays`` as ``training/train.py`` saves them; float16 becomes float32."""
        self.window, self.end_id = int(arrays["window"]), int(arrays["end_id"])
        self._embedding = _float32(arrays["embedding"])
        self._unembedding = np.ascontiguousarray(self._embedding.T)
        self._norm = _float32(arrays["norm"])
        self._blocks = _blocks_of(arrays)
        self._heads = int(arrays["heads"])
        self._head_width = self._embedding.shape[1] // self._heads
        self._frequencies = _ROTARY_BASE ** (-np.arange(0, self._head_width, 2) / self._head_width)

    @classmethod
    def from_file(cls, weights_file: Path) -> "Network":
        with np.load(weights_file) as arrays:
            return cls(arrays)

    @property
    def vocabulary(self) -> int:
        return len(self._embedding)

    def read(self, token_ids: np.ndarray) -> tuple[Cache, np.ndarray]:
        """Reads a prompt: ``token_ids`` [n], 0 < n <= window -> its cache, and the next logits [vocabulary]."""
        cache = Cache(len(self._blocks), self._heads, self.window, self._head_width)
        return cache, self._pass(cache, token_ids)

    def advance(self, cache: Cache, token_id: int) -> np.ndarray:
        """Appends one token and returns the next logits [vocabulary]."""
        return self._pass(cache, np.array([token_id]))

    def _pass(self, cache: Cache, token_ids: np.ndarray) -> np.ndarray:
        count = len(token_ids)
        rotation = self._rotation(np.arange(cache.length, cache.length + count))
        hidden = None if count == 1 else np.triu(np.full((count, count), -np.inf, np.float32), 1)
        x = self._embedding[token_ids]
        for index, block in enumerate(self._blocks):
            x = x + self._attended(_normed(x, block.attention_norm), index, cache, rotation, hidden)
            x = x + np.square(np.maximum(_normed(x, block.mlp_norm) @ block.mlp_in, 0)) @ block.mlp_out
        cache.length += count
        return _normed(x[-1], self._norm) @ self._unembedding

    def _attended(
        self,
        x: np.ndarray,
        index: int,
        cache: Cache,
        rotation: tuple[np.ndarray, np.ndarray],
        hidden: np.ndarray | None,
    ) -> np.ndarray:
        """``x`` [n, width] -> [n, width]; ``hidden`` [n, n] is minus infinity for masked positions."""
        block = self._blocks[index]
        projected = (x @ block.attention_in).reshape(len(x), 3, self._heads, self._head_width)
        query, key, value = projected.transpose(1, 2, 0, 3)
        keys, values = cache.put(index, _rotated(key, rotation), value)
        scores = _rotated(query, rotation) @ keys.transpose(0, 2, 1) * np.float32(self._head_width**-0.5)
        weights = _softmax(scores if hidden is None else scores + hidden)
        return (weights @ values).transpose(1, 0, 2).reshape(x.shape) @ block.attention_out

    def _rotation(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [n, head width / 2] of rotary positions (RoFormer, arXiv 2104.09864)."""
        angles = positions[:, None] * self._frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _blocks_of(arrays: Mapping[str, np.ndarray]) -> list[_Block]:
    count = sum(1 for name in arrays if name.endswith(".attention_in"))
    return [_Block(*(_float32(arrays[f"blocks.{index}.{name}"]) for name in _BLOCK_ARRAYS)) for index in range(count)]


def _float32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


def _normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """RMSNorm over the last axis."""
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x / np.sqrt(mean_square + _NORM_EPSILON) * gain


def _rotated(x: np.ndarray, rotation: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    cos, sin = rotation
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
