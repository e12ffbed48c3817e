"""Request ids: 128 random bits as 32 hexadecimal digits."""

import os

_DIGITS = 32
_IDS_AT_ONCE = 256
_unused: list[str] = []


def new_request_id() -> str:
    """Returns a new id; thread-safe. Requests randomness from the operating system once for many ids."""
    try:
        return _unused.pop()
    except IndexError:
        digits = os.urandom(_IDS_AT_ONCE * _DIGITS // 2).hex()
        _unused.extend(digits[start : start + _DIGITS] for start in range(_DIGITS, len(digits), _DIGITS))
        return digits[:_DIGITS]


os.register_at_fork(after_in_child=_unused.clear)
