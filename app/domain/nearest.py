"""The nearest valid name, for messages about a mistyped name."""

import difflib
from collections.abc import Iterable, Sequence

LONGEST_NAME = 128
_MOST_LISTED = 12


def nearest(name: str, valid: Sequence[str]) -> str:
    """Returns ``; did you mean 'x'?`` or the valid names, as the end of a sentence."""
    found = nearest_of(name, valid)
    if found:
        return f"; did you mean '{found}'?"
    listed = sorted(valid)[:_MOST_LISTED] + ["..."] * (len(valid) > _MOST_LISTED)
    return f"; valid here: {', '.join(listed)}" if valid else ""


def nearest_of(name: str, valid: Iterable[str]) -> str | None:
    """``name``: of any length. For a name of 2 MB difflib alone needs 72 MB and up to 6 s."""
    return next(iter(difflib.get_close_matches(name[:LONGEST_NAME], list(valid), n=1)), None)
