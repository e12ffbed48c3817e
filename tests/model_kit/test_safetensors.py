import json

import numpy as np
import pytest
from model_kit.safetensors import mapped


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
