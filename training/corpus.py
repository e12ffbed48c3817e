"""The text that the model learns from: the language reference that every Python installation carries."""

import hashlib
import re
from pydoc_data.topics import topics

_HEADING = re.compile(r"(?m)^(?=\S[^\n]*\n(?:\*{4,}|={4,}|-{4,}|~{4,})$)")
_HELD_OUT_EVERY = 20


def sections() -> list[str]:
    """Every section once (a heading and what stands under it), in a fixed order."""
    parts = (part.strip() + "\n" for name in sorted(topics) for part in _HEADING.split(topics[name]))
    return list(dict.fromkeys(part for part in parts if part.strip()))


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """The sections to train on, and one in twenty that the model never sees."""
    held_out = texts[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]
    return [text for text in texts if text not in held_out], held_out


def fingerprint(texts: list[str]) -> str:
    """SHA-256 over the sections: it changes with the Python release."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
