"""How quickly something becomes free: bytes, connections."""

from math import ceil, exp

WINDOW_S = 5.0
LONGEST_S = 30


class Outflow:
    """A rate in which what left lately counts most."""

    def __init__(self) -> None:
        self._recent = 0.0
        self._at = 0.0

    def left(self, amount: float, now: float) -> None:
        self._recent = self._decayed(now) + amount
        self._at = now

    def retry_after_s(self, amount: float, now: float) -> int:
        """Returns the whole seconds until this amount is expected to be free: at least 1; 1 without measurements."""
        if not self._recent:
            return 1
        rate = self._decayed(now) / WINDOW_S
        return min(max(ceil(amount / rate), 1), LONGEST_S) if rate * LONGEST_S > amount else LONGEST_S

    def _decayed(self, now: float) -> float:
        return self._recent * exp((self._at - now) / WINDOW_S)
