"""The slot of one running request."""

from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.admission.account import Account
    from app.admission.limit import Limit
    from app.admission.model_queue import ModelQueue


class Slot:
    """Released by :meth:`leave` or at the end of a ``with`` block. Releasing it again is a no-op."""

    __slots__ = ("_accounts", "_has_output", "_is_left", "_limit", "_model_queue", "queued_s", "since")

    def __init__(self, model_queue: "ModelQueue", accounts: "tuple[Account, ...]", queued_s: float) -> None:
        self._model_queue = model_queue
        self._accounts = accounts
        self.since = monotonic()
        self._has_output = False
        self._is_left = False
        self._limit: Limit = model_queue.limit
        """A later configuration of the model has another limit, which does not know this request."""
        self._limit.started(self, self.since)
        self.queued_s = queued_s
        """Seconds that the request waited for its slot."""

    def output(self) -> None:
        """Call this when a response of a decoupled model arrives."""
        now = monotonic()
        if self._has_output:
            self._limit.next_output(self, now)
        else:
            self._has_output = True
            self._limit.first_output(self, now)
            self._model_queue.responded(now - self.since)

    def answered(self) -> None:
        """Call this after each call to the model, if the slot is kept for several calls."""
        now = monotonic()
        self._model_queue.learn(now, now - self.since, None)
        self.since = now

    def leave(self, error: BaseException | None = None) -> None:
        """Releases the slot. ``error``: the error of the request, if it failed."""
        if not self._is_left:
            self._is_left = True
            self._limit.left(self, monotonic())
            self._model_queue.left(self._accounts, self.since, error)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.leave(exc)
