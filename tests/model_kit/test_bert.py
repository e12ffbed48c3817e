"""The encoder's numerics. tests/triton_models/test_embedding.py compares the whole network with the original."""

import math

import numpy as np
import pytest
from model_kit.bert import Bert, erf, gelu, softmax

WIDTH, INNER, WORDS = 8, 16, 20


@pytest.fixture(scope="module")
def network():
    """Two layers of two heads with random weights."""
    random = np.random.default_rng(0)

    def dense(name, rows, columns):
        yield f"{name}.weight", random.normal(size=(rows, columns)).astype(np.float32)
        yield f"{name}.bias", random.normal(size=rows).astype(np.float32)

    def norm(name):
        yield f"{name}.weight", np.ones(WIDTH, np.float32)
        yield f"{name}.bias", np.zeros(WIDTH, np.float32)

    weights = dict(norm("embeddings.LayerNorm"))
    for kind, rows in (("word", WORDS), ("position", 10), ("token_type", 2)):
        weights[f"embeddings.{kind}_embeddings.weight"] = random.normal(size=(rows, WIDTH)).astype(np.float32)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        for part in ("query", "key", "value"):
            weights.update(dense(f"{layer}.attention.self.{part}", WIDTH, WIDTH))
        weights.update(dense(f"{layer}.attention.output.dense", WIDTH, WIDTH))
        weights.update(dense(f"{layer}.intermediate.dense", INNER, WIDTH))
        weights.update(dense(f"{layer}.output.dense", WIDTH, INNER))
        weights.update(norm(f"{layer}.attention.output.LayerNorm"))
        weights.update(norm(f"{layer}.output.LayerNorm"))
    return Bert(weights, head_count=2)


def test_erf_is_within_4e_7_everywhere():
    values = np.linspace(-10, 10, 20_001, dtype=np.float32)
    assert np.abs(erf(values) - [math.erf(value) for value in values.tolist()]).max() < 4e-7


def test_gelu_keeps_large_values_and_zeroes_small_values():
    assert gelu(np.float32([-10, 0, 50])) == pytest.approx([0, 0, 50], abs=1e-6)


def test_softmax_of_large_scores_does_not_overflow():
    assert softmax(np.float32([[1e30, 1e30]])).tolist() == [[0.5, 0.5]]


def test_a_text_does_not_change_the_result_of_its_neighbours(network):
    texts = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6, 7, 8, 9, 1, 2])]
    together = network.states_of(texts)
    for text, states in zip(texts, together, strict=True):
        np.testing.assert_allclose(states, network.states_of([text])[0], atol=1e-5)
        assert states.shape == (len(text), WIDTH)
        assert states.dtype == np.float32


def test_a_state_depends_on_the_whole_text_and_the_position(network):
    first, changed_end, moved = (network.states_of([np.array(ids)])[0] for ids in ([1, 2, 3], [1, 2, 4], [2, 1, 3]))
    assert not np.allclose(first[0], changed_end[0], atol=1e-3)
    assert not np.allclose(first[0], moved[1], atol=1e-3)
