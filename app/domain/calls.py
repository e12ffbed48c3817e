"""The interface for observers of inference calls: metrics, the tensor log, tracing, the health of models."""

from collections.abc import Sequence
from typing import Protocol

from app.domain.errors import GatewayError
from app.domain.inference import InferenceRequest, InferenceResponse


class ObservedCall:
    """Observes one inference call. The methods of this base class are no-ops."""

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        """The request that the engine sends."""

    def response(self, response: InferenceResponse) -> None:
        """Called for each response."""

    def ended(self, code: str, error: GatewayError | None) -> None:
        """Called exactly once at the end. ``code``: the gRPC status, ``CANCELLED`` if the caller disconnected."""


class CallObserver(Protocol):
    def started(self, request: InferenceRequest, method: str) -> ObservedCall:
        """``method``: ``ModelInfer`` or ``ModelStreamInfer``."""


class CallObservers:
    """Combines several observers. Each one gets the request of the previous one. A no-op without observers."""

    def __init__(self, *observers: CallObserver) -> None:
        self._observers = observers

    def started(self, request: InferenceRequest, method: str) -> ObservedCall:
        calls = []
        for observer in self._observers:
            call = observer.started(request, method)
            request = call.request
            calls.append(call)
        return calls[0] if len(calls) == 1 else _ObservedCalls(request, calls)


class _ObservedCalls(ObservedCall):
    def __init__(self, request: InferenceRequest, calls: Sequence[ObservedCall]) -> None:
        super().__init__(request)
        self._calls = calls

    def response(self, response: InferenceResponse) -> None:
        for call in self._calls:
            call.response(response)

    def ended(self, code: str, error: GatewayError | None) -> None:
        for call in self._calls:
            call.ended(code, error)


NO_OBSERVER = CallObservers()
