"""Token ids -> bytes. In a byte-level vocabulary each token has fixed bytes, so calls are independent."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from model_kit.outcomes import InvalidInput


class Vocabulary:
    """The bytes of each token id; special tokens stand for no text."""

    def __init__(self, ids_by_token: Mapping[str, int], special_ids: Iterable[int]) -> None:
        self._bytes_by_id = [b""] * (max(ids_by_token.values()) + 1)
        special = set(special_ids)
        for token, token_id in ids_by_token.items():
            if token_id not in special:
                self._bytes_by_id[token_id] = bytes(_BYTE_BY_SYMBOL[symbol] for symbol in token)

    @classmethod
    def from_file(cls, tokenizer_file: Path) -> "Vocabulary":
        """Read the ``tokenizer.json`` of the ``tokenizers`` package."""
        described = json.loads(tokenizer_file.read_text(encoding="utf-8"))
        special_ids = [token["id"] for token in described["added_tokens"] if token["special"]]
        return cls(described["model"]["vocab"], special_ids)

    def bytes_of(self, token_ids: np.ndarray) -> bytes:
        """Returns the bytes of ``token_ids`` [n], which may contain incomplete characters.

        Raises:
            InvalidInput: an id is not in the vocabulary.
        """
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < len(self._bytes_by_id):
            raise InvalidInput("NEWEST_IDS holds an id outside the vocabulary")
        return b"".join(self._bytes_by_id[token_id] for token_id in token_ids)


def _byte_by_symbol() -> dict[str, int]:
    """Maps each printable symbol of byte-level BPE to its byte (the inverse of GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_BY_SYMBOL = _byte_by_symbol()
