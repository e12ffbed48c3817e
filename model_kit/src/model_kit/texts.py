"""Texts in BYTES tensors."""

import numpy as np

from model_kit.outcomes import InvalidInput

NOT_UTF8 = "TEXT is not UTF-8"
# All that this module ever says, so that a caller who sees only the text of an error can tell it from a fault.
FAULTS = frozenset({NOT_UTF8})


def texts_of(tensor: np.ndarray) -> list[str]:
    """The texts of a BYTES tensor [b, 1].

    Raises:
        InvalidInput: one of them is not UTF-8.
    """
    try:
        return [value.decode() for value in tensor.reshape(-1)]
    except UnicodeDecodeError:
        raise InvalidInput(NOT_UTF8) from None
