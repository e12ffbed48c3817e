import numpy as np
import pytest
from model_kit.outcomes import InvalidInput
from model_kit.texts import FAULTS, texts_of


def test_every_row_is_a_text():
    assert texts_of(np.array([[b""], ["你好".encode()]], dtype=np.object_)) == ["", "你好"]


def test_invalid_utf_8_is_rejected_with_a_fixed_message():
    with pytest.raises(InvalidInput) as refusal:
        texts_of(np.array([[b"fine"], [b"\xff"]], dtype=np.object_))
    assert str(refusal.value) in FAULTS
