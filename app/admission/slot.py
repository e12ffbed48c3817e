"""The slot of one running request."""

from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.admission.account import Account
    from app.admission.model_queue import ModelQueue


class Slot:
    """Released by :meth:`leave` or at the end of a ``with`` block. Releasing it again is a no-op."""

    __slots__ = ("_accounts", "_has_output", "_is_left", "_model_queue", "_since", "queued_s")

    def __init__(self, model_queue: "ModelQueue", accounts: "tuple[Account, ...]", queued_s: float) -> None:
        self._model_queue = model_queue
        self._accounts = accounts
        self._since = monotonic()
        self._has_output = False
        self._is_left = False
        self.queued_s = queued_s
        """Seconds that the request waited for its slot."""

    def first_output(self) -> None:
        """Call this when the first response of a decoupled model arrives. Later calls are no-ops."""
        if not self._has_output:
            self._has_output = True
            now = monotonic()
            self._model_queue.responded(now, now - self._since)

    def answered(self) -> None:
        """Call this after each call to the model, if the slot is kept for several calls."""
        now = monotonic()
        self._model_queue.learn(now, now - self._since, None)
        self._since = now

    def leave(self, error: BaseException | None = None) -> None:
        """Releases the slot. ``error``: the error of the request, if it failed."""
        if not self._is_left:
            self._is_left = True
            self._model_queue.left(self._accounts, self._since, error)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.leave(exc)
