"""Texts of others: the nearest valid name for a mistyped one; forms that are safe in messages, terminals and JSON."""

import difflib
import ipaddress
from collections.abc import Collection, Iterable

LONGEST_NAME = 128
_DID_YOU_MEAN, _VALID_HERE = "; did you mean '", "; valid here: "
_MOST_LISTED = 12


def nearest(name: str, valid: Collection[str]) -> str:
    """Returns ``; did you mean 'x'?`` or the valid names, as the end of a sentence."""
    found = nearest_of(name, valid)
    if found:
        return f"{_DID_YOU_MEAN}{found}'?"
    listed = sorted(valid)[:_MOST_LISTED] + ["..."] * (len(valid) > _MOST_LISTED)
    return f"{_VALID_HERE}{', '.join(listed)}" if valid else ""


def without_nearest(text: str) -> str:
    """Returns a message without the names that :func:`nearest` added, for callers who may not see them."""
    return text.partition(_DID_YOU_MEAN)[0].partition(_VALID_HERE)[0]


def nearest_of(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """``name``: of any length. For a name of 2 MB difflib alone needs 72 MB and up to 6 s."""
    return next(iter(difflib.get_close_matches(name[:LONGEST_NAME], list(valid), 1, cutoff)), None)


def printable(text: str, max_length: int) -> str:
    r"""Replaces control characters, invisible characters and lone surrogates with escapes such as ``\x1b``."""
    cut = text if len(text) <= max_length else f"{text[:max_length]}..."
    if cut.isprintable():
        return cut
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in cut)


def shown(text: str, longest: int = 64, substitute: str = "?") -> str:
    """Returns the first ``longest`` characters, with ``substitute`` for each one that is not printable."""
    return "".join(character if character.isprintable() else substitute for character in text[:longest])


def is_loopback(host: str) -> bool:
    """Whether a host always means this machine. ``host``: a name or an address without port and brackets.

    Names are not resolved.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
