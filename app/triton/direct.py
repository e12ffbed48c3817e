"""The only Triton of a gateway, called without a balancer."""

from app.domain.deadline import Deadline
from app.domain.errors import Unavailable
from app.domain.inference import InferenceRequest, InferenceResponse
from app.triton.engine import TritonEngine
from app.triton.retry import may_repeat


class DirectEngine(TritonEngine):
    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Repeats the call once, where :func:`may_repeat` allows it."""
        try:
            return await super().infer(request, deadline)
        except Unavailable as exc:
            if not may_repeat(exc, request) or deadline.has_passed:
                raise
        return await super().infer(request, deadline)
