"""The contents of the requests, as arrays and bytes. Each server has its own format of them."""

from pathlib import Path

import numpy as np
import orjson

ROOT = Path(__file__).parents[1]

SMALL = np.array([1.5, 2.5, 3.5, 4.5], np.float32)
LARGE = np.random.default_rng(7).standard_normal(150_528, np.float32)
"""The number of values in an image of 224 by 224 pixels."""
FILE = b"\x89PNG\r\n\x1a\n" + np.random.default_rng(7).bytes(200_000)
BINARY = {f"{mib} MiB": b"\x89PNG\r\n\x1a\n" + np.random.default_rng(7).bytes(mib * 2**20 - 8) for mib in (1, 16)}
BLANK = (ROOT / "samples" / "blank.png").read_bytes()
"""An image without text: the OCR pipeline ends early."""
EVENTS = 5_000
IDLE_INTERVAL_MS = 600_000

TEXT = "The striker scored twice, what a wonderful match!"
TOPICS = ["politics", "business", "sport", "technology", "science", "health", "travel", "food", "entertainment"]
SENTIMENTS = ["positive", "neutral", "negative"]
INSIGHTS = ("insights", "insights_direct", "insights_bls")

BOUNDARY = "5b7a1f0c"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def json_of(**values: object) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def form_of(field: str, file: bytes) -> bytes:
    """A form with one PNG file."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="image.png"\r\n'
        "Content-Type: image/png\r\n\r\n"
    )
    return head.encode() + file + f"\r\n--{BOUNDARY}--\r\n".encode()
