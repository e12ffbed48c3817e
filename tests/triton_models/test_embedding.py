"""Compares the sentence encoder, with its real weights and in the models' environment, with the original.

``fixtures/sentence_vectors.npz`` contains the vectors of sentence-transformers 6.2.0 on torch 2.13.0 (CPU).
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

FIXTURE = Path(__file__).with_name("fixtures") / "sentence_vectors.npz"
SCRIPT = Path(__file__).with_name("encode_texts.py")


@pytest.fixture(scope="module")
def original():
    with np.load(FIXTURE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def encoded(original, models_venv):
    """The vectors of the fixture's texts, encoded ``alone`` and ``together``, shape [n, 384]."""
    run = subprocess.run(
        [models_venv / "bin/python3", SCRIPT],
        input=json.dumps(original["texts"].tolist()).encode(),
        capture_output=True,
        check=True,
        env={"OMP_NUM_THREADS": "1"},
    )
    return {name: np.array(rows) for name, rows in json.loads(run.stdout).items()}


@pytest.mark.parametrize("way", ["alone", "together"])
def test_vectors_equal_those_of_the_original(original, encoded, way):
    assert np.abs(encoded[way] - original["vectors"]).max() < 3e-7


def test_vectors_have_length_one(encoded):
    assert np.linalg.norm(encoded["alone"], axis=1) == pytest.approx(1)
