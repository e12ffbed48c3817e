"""The decoder-only transformer in PyTorch. ``tokens_generate/1/tokens_transformer.py`` is the same model in numpy.

Pre-norm blocks (RMSNorm, causal attention with rotary positions, an MLP with squared ReLU), no biases, the output
layer tied to the embedding. A position attends to itself and the ``window - 1`` positions before it, so that a cache
of ``window`` entries is sufficient for text of any length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 2048
    width: int = 192
    heads: int = 6
    blocks: int = 4
    window: int = 512
    dropout: float = 0.15


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, residual_std = shape.width, 0.5 / math.sqrt(shape.width * 2 * shape.blocks)
        self.heads, self.dropout = shape.heads, shape.dropout
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.attention_in = nn.Parameter(torch.randn(3 * width, width) / math.sqrt(width))
        self.attention_out = nn.Parameter(torch.randn(width, width) * residual_std)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.mlp_in = nn.Parameter(torch.randn(4 * width, width) / math.sqrt(width))
        self.mlp_out = nn.Parameter(torch.randn(width, 4 * width) * residual_std)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], visible: Tensor | None) -> Tensor:
        """``x`` [batch, length, width] -> the same shape; ``visible`` [length, length], None where causal is enough."""
        attended = self._attended(_normed(x, self.attention_norm), rotation, visible)
        x = x + self._thinned(functional.linear(attended, self.attention_out))
        hidden = functional.relu(functional.linear(_normed(x, self.mlp_norm), self.mlp_in)).square()
        return x + self._thinned(functional.linear(hidden, self.mlp_out))

    def _thinned(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def _attended(self, x: Tensor, rotation: tuple[Tensor, Tensor], visible: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        projected = functional.linear(x, self.attention_in).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            _rotated(query, rotation), _rotated(key, rotation), value, attn_mask=visible, is_causal=visible is None
        )
        return attended.transpose(1, 2).reshape(batch, length, width)


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.Parameter(torch.ones(shape.width))

    def forward(self, token_ids: Tensor) -> Tensor:
        """``token_ids`` [batch, length] -> logits [batch, length, vocabulary]."""
        length = token_ids.shape[1]
        rotation = _rotation(length, self.shape.width // self.shape.heads)
        visible = None if length <= self.shape.window else _visible(length, self.shape.window)
        x = functional.dropout(functional.embedding(token_ids, self.embedding), self.shape.dropout, self.training)
        for block in self.blocks:
            x = block(x, rotation, visible)
        return functional.linear(_normed(x, self.norm), self.embedding)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, NORM_EPSILON)


def _rotation(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_width / 2] of rotary positions (RoFormer, arXiv 2104.09864)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _visible(length: int, window: int) -> Tensor:
    age = torch.arange(length)[:, None] - torch.arange(length)
    return (age >= 0) & (age < window)
