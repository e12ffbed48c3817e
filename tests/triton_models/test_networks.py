"""The real networks in the models' environment: detection and recognition of text, and the sentence encoder.

``fixtures/sentence_vectors.npz`` contains the vectors of sentence-transformers 6.2.0 on torch 2.13.0 (CPU).
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/triton_models"


def printed_by(models_venv, *images, stdin=b""):
    """Runs the networks with the models' Python. Returns what the script prints, as a value."""
    command = [models_venv / "bin/python3", HERE / "run_networks.py", *images]
    run = subprocess.run(command, input=stdin, capture_output=True, check=True, env={"OMP_NUM_THREADS": "1"})
    return json.loads(run.stdout)


def sheet(width, height, *words):
    """Returns a white image with words at (left, top, size in pixels, text)."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for left, top, size_px, text in words:
        draw.text((left, top), text, fill="black", font=ImageFont.load_default(size_px))
    return image


def sample(name):
    with Image.open(ROOT / "samples" / name) as image:
        return image.copy()


SIGN = sample("sign.png")
STRIP = sheet(170, 30, (10, 0, 24, "Strip word 0"))
IMAGES = {
    "sign": SIGN,
    "blank": sample("blank.png"),
    "scribble": sample("scribble.png"),
    "upside_down": SIGN.rotate(180),
    "sloping": SIGN.rotate(10, expand=True, fillcolor=255),
    "photo_sized": SIGN.resize((3200, 1600)),
    "strip": STRIP,
    "reading_down": STRIP.rotate(270, expand=True),
    "reading_up": STRIP.rotate(90, expand=True),
    "long_strip": sheet(3000, 30, *((10 + 250 * word, 0, 24, f"Strip word {word}") for word in range(12))),
    "columns": sheet(
        640, 200, (20, 20, 44, "one"), (250, 26, 44, "two"), (20, 110, 44, "three"), (250, 104, 44, "four")
    ),
    "one_pixel": sheet(1, 1),
    "hair_wide": sheet(30_000, 1),
    "hair_high": sheet(1, 30_000),
}
LINES = ["Hello Triton gateway", "Open daily 9 to 18", "Please ring the bell"]


@pytest.fixture(scope="module")
def read(tmp_path_factory, models_venv):
    """Texts, scores and boxes by image name; one process of the models' Python reads all images."""
    folder = tmp_path_factory.mktemp("images")
    for name, image in IMAGES.items():
        image.save(folder / f"{name}.png")
    return printed_by(models_venv, *sorted(folder.iterdir()))


@pytest.mark.parametrize("name", ["sign", "upside_down", "sloping", "photo_sized"])
def test_the_sign_is_read(read, name):
    assert sorted(text.strip() for text in read[name]["texts"]) == sorted(LINES)


def test_lines_are_in_reading_order(read):
    assert read["sign"]["texts"] == LINES
    assert read["columns"]["texts"] == ["one", "two", "three", "four"]


def test_boxes_are_original_pixels_clockwise_from_top_left(read):
    top_left, top_right, bottom_right, bottom_left = read["sign"]["boxes"][0]
    assert top_left == pytest.approx([60, 55], abs=12)
    assert top_right == pytest.approx([470, 55], abs=12)
    assert bottom_right == pytest.approx([470, 98], abs=12)
    assert bottom_left == pytest.approx([60, 98], abs=12)
    assert read["photo_sized"]["boxes"][0][0] == pytest.approx([5 * top_left[0], 5 * top_left[1]], abs=40)


@pytest.mark.parametrize("name", ["strip", "reading_down", "reading_up"])
def test_text_that_fills_the_image_is_read_in_any_direction(read, name):
    assert [text.strip() for text in read[name]["texts"]] == ["Strip word 0"]


def test_a_long_strip_is_read_completely(read):
    assert [text.strip() for text in read["long_strip"]["texts"]] == [f"Strip word {word}" for word in range(12)]


def test_a_scribble_is_detected_with_a_low_score(read):
    assert len(read["scribble"]["boxes"]) == 1
    assert read["scribble"]["scores"][0] < 0.3


@pytest.mark.parametrize("name", ["blank", "one_pixel", "hair_wide", "hair_high"])
def test_images_without_text_have_no_boxes(read, name):
    assert read[name]["boxes"] == []


@pytest.fixture(scope="module")
def original():
    with np.load(HERE / "fixtures/sentence_vectors.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def encoded(original, models_venv):
    """The vectors of the fixture's texts, encoded ``alone`` and ``together``, shape [n, 384]."""
    texts = json.dumps(original["texts"].tolist()).encode()
    return {name: np.array(rows) for name, rows in printed_by(models_venv, stdin=texts).items()}


@pytest.mark.parametrize("way", ["alone", "together"])
def test_vectors_equal_those_of_the_original(original, encoded, way):
    assert np.abs(encoded[way] - original["vectors"]).max() < 3e-7
