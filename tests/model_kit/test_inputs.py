"""What models read: images, audio, texts, labels, the tensors of earlier steps, and weights.

tests/triton_models/test_networks.py compares the whole encoder with the original.
"""

import json
import random
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from model_kit.bert import softmax
from model_kit.contract import require_at_most, require_shape
from model_kit.images import FAULTS as IMAGE_FAULTS
from model_kit.images import pixels_of, single_image
from model_kit.outcomes import ContractBroken, InvalidInput
from model_kit.pcm import FAULTS as AUDIO_FAULTS
from model_kit.pcm import Frames, audio_of
from model_kit.safetensors import mapped
from model_kit.texts import FAULTS as TEXT_FAULTS
from model_kit.texts import texts_of
from model_kit.zero_shot import FAULTS as LABEL_FAULTS
from model_kit.zero_shot import MAX_LABELS, REMEMBERED_LABELS, ZeroShot, answer_of, labels_of
from PIL import Image

from app.core.errors import Fault, FaultKind
from app.triton.grpc_errors import fault_in


def encoded(image, file_format="PNG", **options):
    stream = BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def png_that_claims(width, height):
    """A PNG whose header has a size that does not match its few bytes of data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")


@pytest.fixture
def corner():
    """20 wide, 10 high, white, with a red top left quarter."""
    image = Image.new("RGB", (20, 10), "white")
    image.paste("red", (0, 0, 10, 5))
    return image


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_every_format_decodes_to_blue_green_red(corner, file_format):
    pixels = pixels_of(encoded(corner.resize((200, 100)), file_format))
    assert pixels.shape == (100, 200, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels[20, 20].astype(int) - (0, 0, 255)).max() < 12
    assert np.abs(pixels[80, 180].astype(int) - 255).max() < 12


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK"])
def test_every_colour_mode_becomes_three_channels(mode):
    file_format = "JPEG" if mode == "CMYK" else "PNG"
    pixels = pixels_of(encoded(Image.new("RGB", (8, 4), "white").convert(mode), file_format))
    assert pixels.shape == (4, 8, 3)
    assert pixels.min() == 255


def test_sixteen_bit_grey_keeps_its_range():
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    pixels = pixels_of(encoded(Image.fromarray(ramp)))
    assert pixels.min() == 0
    assert pixels.max() == 255
    assert 120 < pixels.mean() < 135


def test_exif_orientation_turns_the_image_upright(corner):
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its left side
    lying = encoded(corner.resize((200, 100)).rotate(90, expand=True), "JPEG", exif=exif.tobytes(), quality=95)
    pixels = pixels_of(lying)
    assert pixels.shape == (100, 200, 3)
    assert np.abs(pixels[10, 10].astype(int) - (0, 0, 255)).max() < 12


@pytest.mark.parametrize(("ink", "sheet"), [("black", 255), ("white", 0)])
def test_transparent_images_get_a_contrasting_background(ink, sheet):
    image = Image.new("RGBA", (20, 10), (128, 128, 128, 0))
    image.paste(ink, (0, 0, 5, 10))
    pixels = pixels_of(encoded(image))
    assert (pixels[:, 10:] == sheet).all()
    assert (pixels[:, :5] == 255 - sheet).all()
    assert pixels_of(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))).min() == 255, "nothing but the background"


def half_of(file_format):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), file_format)
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *(
            (data, "is not a")
            for data in (b"", b"x", b"not an image at all", b"\x89PNG\r\n\x1a\n", b"%PDF-1.7", b"\xff\xd8\xff")
        ),
        (encoded(Image.new("RGB", (20, 10)), "TIFF"), "is not a"),
        (png_that_claims(6000, 6000), "truncated or corrupt"),
        *((half_of(file_format), "truncated or corrupt") for file_format in ("PNG", "JPEG", "BMP")),
        (half_of("WEBP"), "is not a"),
    ],
)
def test_invalid_bytes_are_rejected_with_a_fixed_message(data, message):
    with pytest.raises(InvalidInput, match=message) as refusal:
        pixels_of(data)
    assert str(refusal.value) in IMAGE_FAULTS


@pytest.mark.parametrize("size", [(6400, 6400), (2**31 - 1, 2**31 - 1), (32_001, 1), (1, 32_001)])
def test_a_large_image_is_rejected_before_decoding(size, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InvalidInput, match="too large"):
        pixels_of(png_that_claims(*size))


def test_a_batch_has_a_single_image():
    assert single_image(np.array([[b"bytes"]], dtype=np.object_)) == b"bytes"
    for count in (0, 2, 8):
        with pytest.raises(InvalidInput, match="batch dimension must be 1"):
            single_image(np.full((count, 1), b"bytes", dtype=np.object_))


def test_frames_do_not_depend_on_the_sizes_of_steps():
    audio, chance = random.Random(1).randbytes(5_000), random.Random(2)
    frames, whole, start = Frames(10), b"", 0
    while start < len(audio):
        size = chance.randrange(60)
        whole += frames.whole(audio[start : start + size])
        assert len(whole) % 20 == 0
        start += size
    assert whole == audio


def test_the_rest_is_filled_with_silence():
    frames = Frames(4)
    assert frames.whole(b"12345678abc") == b"12345678"
    assert frames.last() == b"abc\0\0\0\0\0"
    assert frames.last() == b""


def test_audio_of_a_step_is_bounded():
    longest = b"x" * (30 * 32_000)
    assert audio_of(np.array([longest], dtype=np.object_)) == longest
    with pytest.raises(InvalidInput) as refusal:
        audio_of(np.array([longest + b"x"], dtype=np.object_))
    assert str(refusal.value) in AUDIO_FAULTS


def test_every_row_is_a_text():
    assert texts_of(np.array([[b""], ["你好".encode()]], dtype=np.object_)) == ["", "你好"]
    with pytest.raises(InvalidInput) as refusal:
        texts_of(np.array([[b"fine"], [b"\xff"]], dtype=np.object_))
    assert str(refusal.value) in TEXT_FAULTS


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


def test_labels_are_encoded_once(encode, classify):
    """Those with examples at the start, others with the template when they are first used."""
    assert encode.asked == ["cats", "dogs", "fish"]
    classify.scores_of(np.float32([[1, 0, 0]]), ["pets", "fish"])
    for _ in range(2):
        classify.scores_of(np.float32([[1, 0, 0]]), ["pets", "dogs {0}"])
    assert encode.asked == ["cats", "dogs", "fish", "about dogs {0}"]


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
    assert str(refusal.value) in LABEL_FAULTS


def message_of(exc):
    return exc.value.text.format(model="post")


@pytest.mark.parametrize(("shape", "dims"), [((1,), [1]), ((7,), [-1]), ((0, 4, 2), [-1, 4, 2]), ((), [])])
def test_a_tensor_with_the_expected_shape_is_returned(shape, dims):
    tensor = np.zeros(shape)
    assert require_shape("IDS", tensor, dims) is tensor


@pytest.mark.parametrize(("shape", "dims"), [((2,), [1]), ((1, 1), [1]), ((0,), [-1, 4, 2]), ((3, 4, 1), [-1, 4, 2])])
def test_another_shape_is_rejected_with_the_message_of_triton(shape, dims):
    with pytest.raises(ContractBroken) as exc:
        require_shape("IDS", np.zeros(shape), dims)
    expected, seen = (str(list(each)).replace(" ", "") for each in (dims, shape))
    assert fault_in(message_of(exc)) == Fault(FaultKind.SHAPE, model="post", tensor="IDS", expected=expected, seen=seen)


@pytest.mark.parametrize(("shape", "seen"), [((5,), "[5]"), ((1, 8), "[1,8]"), ((3, 2), "[3,2]")])
def test_more_items_than_allowed_are_rejected(shape, seen):
    for allowed in (np.zeros(dims) for dims in ((0,), (3,), (4,), (2, 2))):
        assert require_at_most("IDS", allowed, 4) is allowed
    with pytest.raises(ContractBroken) as exc:
        require_at_most("IDS", np.zeros(shape), 4)
    assert message_of(exc) == f"too many items in input 'IDS' for model 'post'. Expected at most 4, got {seen}."
    assert fault_in(message_of(exc)) == Fault(FaultKind.ITEMS, model="post", tensor="IDS", expected="4", seen=seen)


def test_softmax_of_large_scores_does_not_overflow():
    assert softmax(np.float32([[1e30, 1e30]])).tolist() == [[0.5, 0.5]]


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
