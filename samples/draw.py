"""Draws the sample images in this folder: ``python samples/draw.py`` (needs only Pillow)."""

import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
LINES = ["Hello Triton gateway", "Open daily 9 to 18", "Please ring the bell"]


def main() -> None:
    sheet().save(HERE / "blank.png", optimize=True)
    sign().save(HERE / "sign.png", optimize=True)
    scribble().save(HERE / "scribble.png", optimize=True)


def sheet() -> Image.Image:
    return Image.new("L", (640, 320), 255)


def sign() -> Image.Image:
    image = sheet()
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 8, 631, 311), outline=0, width=4)
    for row, line in enumerate(LINES):
        draw.text((60, 45 + 85 * row), line, fill=0, font=ImageFont.load_default(44))
    return image


def scribble() -> Image.Image:
    """Draws an illegible line that looks like handwriting."""
    image, hand = sheet(), random.Random(9)
    steps = range(60, 560, 9)
    ImageDraw.Draw(image).line([(x, hand.randint(120, 180)) for x in steps], fill=0, width=4, joint="curve")
    return image


if __name__ == "__main__":
    main()
