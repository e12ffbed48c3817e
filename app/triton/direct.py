"""Calls a single Triton without a balancer."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

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
        self._note_repeat()
        return await super().infer(request, deadline)

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        """Repeats a stream once if Triton did not process it, but not after a refusal by an open breaker."""
        is_repeat = False
        while True:
            try:
                async with aclosing(super().infer_stream(request, deadline)) as responses:
                    async for response in responses:
                        if request.inputs:
                            request = request.without_inputs()
                        given = [response]
                        del response  # frees the memory while the response is read
                        yield given.pop()
                return
            except Unavailable as exc:
                if is_repeat or exc.upstream is None or exc.was_sent or deadline.has_passed:
                    raise
            is_repeat = True
            self._note_repeat()

    def _note_repeat(self) -> None:
        if self.on_repeat is not None:
            self.on_repeat()
