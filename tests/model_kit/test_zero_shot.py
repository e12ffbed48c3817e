import numpy as np
import pytest
from model_kit.outcomes import InvalidInput
from model_kit.zero_shot import FAULTS, MAX_LABELS, REMEMBERED_LABELS, ZeroShot, answer_of, labels_of

AXES = ("cats", "dogs", "fish")


class Words:
    """A fake encoder: a text's vector points along the axes that the text names. Records its inputs."""

    def __init__(self):
        self.asked = []

    def __call__(self, texts):
        self.asked += texts
        counts = np.array([[float(axis in text) for axis in AXES] for text in texts], np.float32).reshape(-1, 3)
        return counts + np.float32(1e-6)


@pytest.fixture
def encode():
    return Words()


@pytest.fixture
def classify(encode):
    return ZeroShot(encode, "about {}", {"pets": ["cats", "dogs"], "fish": ["fish"]}, sharpness=10.0)


def as_bytes(*rows):
    return np.array([[label.encode() for label in row] for row in rows], dtype=np.object_)


def test_the_nearest_label_of_each_row_has_the_highest_score(classify):
    """Scores follow the order of the row's own labels."""
    features = np.float32([[0, 0, 1], [1, 0, 0]])
    best, scores = answer_of(classify, features, as_bytes(["pets", "fish"], ["fish", "cats"]))
    assert best.tolist() == [[b"fish"], [b"cats"]]
    assert (scores.shape, scores.dtype) == ((2, 2), np.float32)
    assert scores.sum(axis=1) == pytest.approx([1, 1])
    _, reversed_scores = answer_of(classify, features[:1], as_bytes(["fish", "pets"]))
    assert reversed_scores.tolist() == [scores[0, ::-1].tolist()]


def test_labels_with_examples_are_encoded_once(encode, classify):
    assert encode.asked == ["cats", "dogs", "fish"]
    classify.scores_of(np.float32([[1, 0, 0]]), ["pets", "fish"])
    assert encode.asked == ["cats", "dogs", "fish"]


def test_other_labels_use_the_template_and_are_cached(encode, classify):
    for _ in range(2):
        classify.scores_of(np.float32([[1, 0, 0]]), ["pets", "dogs {0}"])
    assert encode.asked[3:] == ["about dogs {0}"]


def test_the_cache_of_labels_is_limited(encode, classify):
    for number in range(REMEMBERED_LABELS + 10):
        classify.scores_of(np.float32([[1, 0, 0]]), [f"label {number}"])
    assert len(classify._asked_for) == REMEMBERED_LABELS
    classify.scores_of(np.float32([[1, 0, 0]]), ["label 0"])
    assert encode.asked[-1] == "about label 0"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b"a", b"a"],
        [b"a", b""],
        [b" \n"],
        [b"\xff"],
        [b"x" * 101],
        [str(number).encode() for number in range(MAX_LABELS + 1)],
    ],
)
def test_invalid_labels_are_rejected_with_a_fixed_message(values):
    with pytest.raises(InvalidInput) as refusal:
        labels_of(np.array(values, dtype=np.object_))
    assert str(refusal.value) in FAULTS
