"""The encoder's numerics. tests/triton_models/test_networks.py compares the whole network with the original."""

import json
import math

import numpy as np
import pytest
from model_kit.bert import Bert, erf, gelu, softmax
from model_kit.safetensors import mapped

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


def write(path, entries, data, header_bytes=200):
    header = json.dumps(entries).encode().ljust(header_bytes)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_tensors_are_views_of_the_file(tmp_path):
    floats, integers = np.arange(6, dtype="<f4").reshape(2, 3), np.arange(2, dtype="<i8")
    entries = {
        "__metadata__": {"format": "pt"},
        "integers": {"dtype": "I64", "shape": [1, 2], "data_offsets": [0, 16]},
        "floats": {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]},
    }
    tensors = mapped(write(tmp_path / "weights", entries, integers.tobytes() + floats.tobytes(), 400))
    assert list(tensors) == ["integers", "floats"]
    np.testing.assert_array_equal(tensors["floats"], floats)
    np.testing.assert_array_equal(tensors["integers"], [[0, 1]])
    assert not tensors["floats"].flags.writeable
    assert not tensors["floats"].flags.owndata


def test_an_unknown_data_type_is_rejected(tmp_path):
    entries = {"half": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    with pytest.raises(KeyError, match="BF16"):
        mapped(write(tmp_path / "weights", entries, b"\0\0"))
