"""A classifier without training: compares a feature vector with the vectors of the labels' texts."""

import json
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from model_kit.bert import softmax
from model_kit.outcomes import InvalidInput

Encode = Callable[[Sequence[str]], np.ndarray]
"""Texts -> unit vectors [n, width], float32."""

MAX_LABELS = 32
MAX_LABEL_CHARACTERS = 100
REMEMBERED_LABELS = 1024

BAD_LABELS = (
    f"labels must be 1 to {MAX_LABELS} different UTF-8 texts, none of them empty or longer than "
    f"{MAX_LABEL_CHARACTERS} characters"
)
FAULTS = frozenset({BAD_LABELS})


class ZeroShot:
    """A label's vector is computed from its examples, or from the template with the label in place of ``{}``.

    Labels with examples are encoded at load, other labels at their first use; both are cached.
    """

    def __init__(self, encode: Encode, template: str, examples: Mapping[str, Sequence[str]], sharpness: float) -> None:
        """``sharpness`` multiplies the cosines, which lie close together, before the softmax."""
        self._encode = encode
        self._template = template
        self._sharpness = np.float32(sharpness)
        self._vectors = _vectors_of(examples, encode)
        self._asked_for: dict[str, np.ndarray] = {}

    @classmethod
    def from_file(cls, path: Path, encode: Encode, sharpness: float) -> "ZeroShot":
        """``path`` is a JSON object with ``template`` and ``examples``."""
        return cls(encode, **json.loads(path.read_text()), sharpness=sharpness)

    def scores_of(self, features: np.ndarray, labels: Sequence[str]) -> np.ndarray:
        """Unit vectors [b, width] -> how well each label fits, [b, labels], float32; a row sums to 1."""
        return softmax(self._sharpness * (features @ self._vectors_of(labels).T))

    def _vectors_of(self, labels: Sequence[str]) -> np.ndarray:
        new = [label for label in labels if label not in self._vectors and label not in self._asked_for]
        vectors = self._encode([self._template.format(label) for label in new])
        self._asked_for.update(zip(new, vectors, strict=True))
        known = ChainMap(self._vectors, self._asked_for)
        found = np.stack([known[label] for label in labels])
        while len(self._asked_for) > REMEMBERED_LABELS:
            del self._asked_for[next(iter(self._asked_for))]
        return found


def answer_of(classify: ZeroShot, features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best label and the scores of every label, for each row of a request.

    Args:
        features: unit vectors [b, width].
        labels: BYTES [b, n], each row with labels of its own.

    Returns:
        BYTES [b, 1] and FP32 [b, n], in the order of the labels.

    Raises:
        InvalidInput: see ``labels_of``.
    """
    rows = [classify.scores_of(row[None], labels_of(names)) for row, names in zip(features, labels, strict=True)]
    scores = np.concatenate(rows)
    return np.take_along_axis(labels, scores.argmax(axis=1)[:, None], axis=1), scores


def labels_of(values: np.ndarray) -> list[str]:
    """The labels of one row of a BYTES tensor.

    Raises:
        InvalidInput: If there are no labels, too many or duplicates, or a label is empty, too long or not UTF-8.
    """
    if not 0 < len(values) <= MAX_LABELS:
        raise InvalidInput(BAD_LABELS)
    try:
        labels = [value.decode() for value in values]
    except UnicodeDecodeError:
        raise InvalidInput(BAD_LABELS) from None
    if len(set(labels)) < len(labels) or not all(map(_is_label, labels)):
        raise InvalidInput(BAD_LABELS)
    return labels


def _is_label(label: str) -> bool:
    return len(label) <= MAX_LABEL_CHARACTERS and not label.isspace() and label != ""


def _vectors_of(examples: Mapping[str, Sequence[str]], encode: Encode) -> dict[str, np.ndarray]:
    """The direction of the mean of each label's examples, all encoded in one pass."""
    ends = np.cumsum([len(texts) for texts in examples.values()])
    groups = np.split(encode([text for texts in examples.values() for text in texts]), ends[:-1])
    means = [group.mean(axis=0) for group in groups]
    return {label: mean / np.linalg.norm(mean) for label, mean in zip(examples, means, strict=True)}
