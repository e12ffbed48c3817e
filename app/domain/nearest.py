"""The nearest valid name, for messages about a mistyped name."""

import difflib
from collections.abc import Iterable, Sequence

LONGEST_NAME = 128
_DID_YOU_MEAN, _VALID_HERE = "; did you mean '", "; valid here: "
_MOST_LISTED = 12


def nearest(name: str, valid: Sequence[str]) -> str:
    """Returns ``; did you mean 'x'?`` or the valid names, as the end of a sentence."""
    found = nearest_of(name, valid)
    if found:
        return f"{_DID_YOU_MEAN}{found}'?"
    listed = sorted(valid)[:_MOST_LISTED] + ["..."] * (len(valid) > _MOST_LISTED)
    return f"{_VALID_HERE}{', '.join(listed)}" if valid else ""


def without_nearest(text: str) -> str:
    """Returns a message without the names that :func:`nearest` added, for callers who may not see them."""
    return text.partition(_DID_YOU_MEAN)[0].partition(_VALID_HERE)[0]


def nearest_of(name: str, valid: Iterable[str]) -> str | None:
    """``name``: of any length. For a name of 2 MB difflib alone needs 72 MB and up to 6 s."""
    return next(iter(difflib.get_close_matches(name[:LONGEST_NAME], list(valid), n=1)), None)
