"""Which requests are to stop: told by request id, for Triton does not pass cancellation into an ensemble's steps."""

import threading
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from model_kit.outcomes import InvalidInput

_REMEMBERED_S = 60.0
_LONGEST_ID = 256


class Cancellations:
    """A cancelled id is remembered for a minute, in case the call comes before its request."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._watched: WeakValueDictionary[str, threading.Event] = WeakValueDictionary()
        self._forget_at_s: dict[str, float] = {}

    def watch(self, request_id: str) -> threading.Event:
        """The event that is set once the request is cancelled; watched for as long as the caller keeps the event."""
        with self._lock:
            self._forget_old()
            event = self._watched.setdefault(request_id, threading.Event())
            if request_id in self._forget_at_s:
                event.set()
            return event

    def cancel(self, request_id: str) -> None:
        """Stop the request of that id, now or when it comes.

        Raises:
            InvalidInput: no id, or one longer than 256 characters.
        """
        if not 0 < len(request_id) <= _LONGEST_ID:
            raise InvalidInput(f"CANCEL must be a request id of 1 to {_LONGEST_ID} characters")
        with self._lock:
            self._forget_old()
            self._forget_at_s.setdefault(request_id, self._clock_s() + _REMEMBERED_S)
            if event := self._watched.get(request_id):
                event.set()

    def _forget_old(self) -> None:
        """The ids stand in the order in which they came."""
        now_s = self._clock_s()
        while self._forget_at_s and next(iter(self._forget_at_s.values())) <= now_s:
            del self._forget_at_s[next(iter(self._forget_at_s))]
