"""How long to wait before the next restart."""

from collections.abc import Iterator


def delays_s(first_s: float, longest_s: float) -> Iterator[float]:
    """`first_s`, doubled each time, never above `longest_s`."""
    delay_s = first_s
    while True:
        yield min(delay_s, longest_s)
        delay_s = min(delay_s * 2, longest_s)
