"""Cancelled requests by id, because Triton does not pass cancellations to the steps of an ensemble."""

import threading
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from model_kit.outcomes import InvalidInput

_REMEMBERED_S = 60.0
_LONGEST_ID = 256


class Cancellations:
    """Remembers cancelled ids for a minute, because the cancel call can arrive before its request."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._watched: WeakValueDictionary[str, threading.Event] = WeakValueDictionary()
        self._forget_at_s: dict[str, float] = {}

    def watch(self, request_id: str) -> threading.Event:
        """Returns an event that is set when the request is cancelled, as long as the caller keeps the event."""
        with self._lock:
            self._forget_old()
            event = self._watched.setdefault(request_id, threading.Event())
            if request_id in self._forget_at_s:
                event.set()
            return event

    def cancel(self, request_id: str) -> None:
        """Cancels the request with this id, now or when it arrives.

        Raises:
            InvalidInput: If the id is empty or longer than 256 characters.
        """
        if not 0 < len(request_id) <= _LONGEST_ID:
            raise InvalidInput(f"CANCEL must be a request id of 1 to {_LONGEST_ID} characters")
        with self._lock:
            self._forget_old()
            self._forget_at_s.setdefault(request_id, self._clock_s() + _REMEMBERED_S)
            if event := self._watched.get(request_id):
                event.set()

    def _forget_old(self) -> None:
        """The ids are in the order of their arrival."""
        now_s = self._clock_s()
        while self._forget_at_s and next(iter(self._forget_at_s.values())) <= now_s:
            del self._forget_at_s[next(iter(self._forget_at_s))]
