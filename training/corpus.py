"""The training text: the language reference in every Python installation."""

import hashlib
import re
from pydoc_data.topics import topics

_HEADING = re.compile(r"(?m)^(?=\S[^\n]*\n(?:\*{4,}|={4,}|-{4,}|~{4,})$)")
_HELD_OUT_EVERY = 20


def sections() -> list[str]:
    """Returns every section once (a heading and its text), in a fixed order."""
    parts = (part.strip() + "\n" for name in sorted(topics) for part in _HEADING.split(topics[name]))
    return list(dict.fromkeys(part for part in parts if part.strip()))


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Returns the training sections, and the held-out sections: one in twenty."""
    held_out = texts[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]
    return [text for text in texts if text not in held_out], held_out


def fingerprint(texts: list[str]) -> str:
    """Returns the SHA-256 of all sections. It changes with the Python release."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
