import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from model_kit.images import pixels_of, single_image
from model_kit.outcomes import InvalidInput
from PIL import Image

from model_kit import images


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


@pytest.mark.parametrize(
    "data", [b"", b"x", b"not an image at all", b"\x89PNG\r\n\x1a\n", b"%PDF-1.7", b"\xff\xd8\xff"]
)
def test_invalid_bytes_are_rejected_with_a_fixed_message(data):
    with pytest.raises(InvalidInput, match="is not a") as refusal:
        pixels_of(data)
    assert str(refusal.value) in images.FAULTS


def test_unlisted_formats_are_not_parsed(corner):
    with pytest.raises(InvalidInput, match="is not a"):
        pixels_of(encoded(corner, "TIFF"))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_truncated_image_is_rejected(file_format):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), file_format)
    with pytest.raises(InvalidInput) as refusal:
        pixels_of(whole[: len(whole) // 2])
    assert str(refusal.value) in images.FAULTS


def test_a_header_that_claims_more_data_is_rejected():
    with pytest.raises(InvalidInput, match="truncated or corrupt"):
        pixels_of(png_that_claims(6000, 6000))


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
