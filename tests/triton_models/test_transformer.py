"""Compares the numpy network with PyTorch's logits from the training, and with itself."""

from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TORCH = np.load(ROOT / "tests/triton_models/fixtures/torch_logits.npz")


def logits_after_each(network, token_ids, read):
    """Reads the first ``read`` tokens in one pass, the others one by one. Returns logits [n - read + 1, vocabulary]."""
    cache, logits = network.read(token_ids[:read])
    return np.stack([logits, *(network.advance(cache, int(token_id)) for token_id in token_ids[read:])])


def test_logits_equal_those_of_pytorch(network):
    found = logits_after_each(network, TORCH["short_ids"], read=len(TORCH["short_ids"]) - 2)
    np.testing.assert_allclose(found, TORCH["short_logits"], atol=1e-3)


def test_logits_equal_those_of_pytorch_once_the_window_slides(network):
    found = logits_after_each(network, TORCH["long_ids"], read=network.window)
    np.testing.assert_allclose(found[-3:], TORCH["long_logits"], atol=1e-3)


def test_one_by_one_equals_one_pass(network):
    ids = TORCH["short_ids"]
    whole = np.stack([network.read(ids[:length])[1] for length in range(1, len(ids) + 1)])
    np.testing.assert_allclose(logits_after_each(network, ids, read=1), whole, atol=1e-3)


def test_caches_of_two_texts_are_independent(network):
    ids = TORCH["short_ids"]
    cache, _ = network.read(ids[:5])
    other, _ = network.read(ids[5:])
    expected = network.read(np.append(ids[:5], 7))[1]
    network.advance(other, 9)
    np.testing.assert_allclose(network.advance(cache, 7), expected, atol=1e-3)
