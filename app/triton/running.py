"""A stream that Triton answers now, which can be ended with an error."""

import time

from app.domain.errors import Unavailable
from app.triton.transport import StreamCall


class RunningStream:
    """``model``: the called model. ``began``: in monotonic seconds."""

    def __init__(self, model: str, call: StreamCall) -> None:
        self.model = model
        self.began = time.monotonic()
        self.longest_s = 0.0
        """The longest of the earlier silences that :meth:`sample` saw."""
        self.examined_s = 0.0
        """The silence at the last examination; 0 before the first of this silence."""
        self._call = call
        self._sampled_since: float | None = None
        self._sampled_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether the model has sent a response."""
        return self._call.arrived is not None

    @property
    def silent_s(self) -> float:
        """How long the reader has waited for the next response; 0 while it does not wait."""
        since = self._call.waits_since
        return 0.0 if since is None else time.monotonic() - since

    def sample(self) -> None:
        """Call this several times a second: it is cheaper than to measure each silence."""
        since = self._call.waits_since
        if since != self._sampled_since:
            self.longest_s = max(self.longest_s, self._sampled_s)
            self._sampled_since, self.examined_s = since, 0.0
        self._sampled_s = self.silent_s

    def end(self, error: Unavailable) -> None:
        """Ends the reader's wait with the error. A no-op while the reader does not wait."""
        self._call.interrupt(error)
