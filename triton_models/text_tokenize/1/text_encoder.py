"""Converts a prompt's bytes to token ids with the byte-level BPE of ``training/train.py``."""

from pathlib import Path

import numpy as np
from model_kit.outcomes import InvalidInput
from tokenizers import Tokenizer

_END = "<|end|>"
_NEWEST_CHARACTERS = 16_384


class Encoder:
    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._tokenizer.encode_special_tokens = True  # "<|end|>" in a prompt is text, not the end token
        self._end_id = self._tokenizer.token_to_id(_END)

    def ids_of(self, prompt: bytes) -> np.ndarray:
        """Returns token ids [n], int32, n > 0, of the last 16,384 characters; an empty prompt starts a new text.

        Raises:
            InvalidInput: If the bytes are not UTF-8.
        """
        try:
            text = prompt.decode()
        except UnicodeDecodeError:
            raise InvalidInput("PROMPT is not UTF-8") from None
        ids = self._tokenizer.encode(text[-_NEWEST_CHARACTERS:]).ids
        return np.array(ids or [self._end_id], np.int32)
