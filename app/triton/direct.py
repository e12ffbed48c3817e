"""Calls a single Triton without a balancer."""

from collections.abc import Callable

from app.domain.deadline import Deadline
from app.domain.errors import Unavailable
from app.domain.inference import InferenceRequest, InferenceResponse
from app.triton.engine import TritonEngine
from app.triton.retry import may_repeat


class DirectEngine(TritonEngine):
    on_repeat: Callable[[], None] | None = None
    """Called before each call that is repeated."""

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Repeats a failed call once if :func:`may_repeat` allows it, but not after a refusal by an open breaker."""
        try:
            return await super().infer(request, deadline)
        except Unavailable as exc:
            if exc.upstream is None or not may_repeat(exc, request) or deadline.has_passed:
                raise
        if self.on_repeat is not None:
            self.on_repeat()
        return await super().infer(request, deadline)
