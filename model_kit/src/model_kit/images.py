"""Decodes images. All limits are checked on the header, before the image is decoded."""

from io import BytesIO

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    ImageStat,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from model_kit.outcomes import InvalidInput

# Imported here, because otherwise Pillow would search all its plugins during the first request.
PARSERS = (
    PngImagePlugin.PngImageFile,
    JpegImagePlugin.JpegImageFile,
    WebPImagePlugin.WebPImageFile,
    BmpImagePlugin.BmpImageFile,
    GifImagePlugin.GifImageFile,
)
FORMATS = [parser.format for parser in PARSERS]
MAX_PIXELS = 40_000_000
MAX_SIDE_PX = 32_000  # OpenCV's warps address pixels with 16 bits

NOT_ONE = "IMAGE must hold exactly one image: the batch dimension must be 1"
UNKNOWN_FORMAT = "IMAGE is not a PNG, JPEG, WebP, BMP or GIF image"
TOO_LARGE = "IMAGE is too large: at most 40 megapixels, and 32000 pixels on a side"
CORRUPT = "IMAGE is truncated or corrupt"
# All error texts of this module, so that callers that get only the text can recognize them.
FAULTS = frozenset({NOT_ONE, UNKNOWN_FORMAT, TOO_LARGE, CORRUPT})

Image.MAX_IMAGE_PIXELS = None  # replaced by _refuse_large, which is stricter and raises instead of a warning


def single_image(tensor: np.ndarray) -> bytes:
    """Returns the only image of a BYTES tensor of shape [1, 1]; the answers of several images are not rectangular.

    Raises:
        InvalidInput: If the number of images is not 1.
    """
    if tensor.size != 1:
        raise InvalidInput(NOT_ONE)
    return tensor.item()


def pixels_of(encoded: bytes) -> np.ndarray:
    """Decodes the first frame, with its EXIF orientation applied and without transparency.

    Returns:
        uint8 [height, width, 3], blue-green-red as OpenCV has it, not writeable.

    Raises:
        InvalidInput: If the input is not an image, is too large or is broken; the text is one of FAULTS.
    """
    image = _opened(encoded)
    _refuse_large(image.size)
    return _decoded(image)


def _opened(encoded: bytes) -> Image.Image:
    try:
        return Image.open(BytesIO(encoded), formats=FORMATS)
    except Exception as exc:  # parsers can raise any exception for hostile bytes
        raise InvalidInput(UNKNOWN_FORMAT) from exc


def _refuse_large(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS or max(size) > MAX_SIDE_PX:
        raise InvalidInput(TOO_LARGE)


def _decoded(image: Image.Image) -> np.ndarray:
    try:
        image.load()
        upright = _opaque(ImageOps.exif_transpose(image))
        return np.frombuffer(upright.tobytes("raw", "BGR"), dtype=np.uint8).reshape(upright.height, upright.width, 3)
    except Exception as exc:  # as above
        raise InvalidInput(CORRUPT) from exc


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow itself would clip values above 255
    if not image.has_transparency_data:
        return image.convert("RGB")
    ink = image.convert("RGBA")
    sheet = Image.new("RGBA", ink.size, _sheet_colour(ink))
    sheet.alpha_composite(ink)
    return sheet.convert("RGB")


def _sheet_colour(ink: Image.Image) -> str:
    """White for dark text and black for light text, so that text on a transparent background stays legible."""
    alpha = ink.getchannel("A")
    if alpha.getbbox() is None:
        return "white"
    return "black" if ImageStat.Stat(ink.convert("L"), mask=alpha).mean[0] > 127 else "white"
