"""Wraps one inference call of the engine: notifies observers and converts errors."""

import asyncio
import time
from typing import Self

from google.protobuf.message import DecodeError

from app.domain.calls import CallObserver
from app.domain.errors import GatewayError, ModelNotReady, UpstreamUnavailable
from app.domain.inference import InferenceRequest, InferenceResponse
from app.triton.errors import error_of_call
from app.triton.health import TritonHealth
from app.triton.transport import RpcError

_CODE_WITHOUT_TRITON: dict[type[GatewayError], str] = dict.fromkeys((ModelNotReady, UpstreamUnavailable), "UNAVAILABLE")
"""The codes of errors with which the gateway itself ended a stream."""


class WatchedCall:
    """A context manager for one call. Converts every gRPC error in the block to a GatewayError.

    Reports each response, and the end of the call once, to the observer and to the health of Triton.
    """

    def __init__(self, request: InferenceRequest, method: str, observer: CallObserver, health: TritonHealth) -> None:
        """Raises UpstreamUnavailable or ModelNotReady, and counts no call, if the model must not be called now."""
        if not request.is_probe and (refusal := health.refusal(request.model)) is not None:
            raise refusal
        self._observed = observer.started(request, method)
        self._timed = health.progress.started(request, method)
        self._health = health
        self._began = time.monotonic()
        self.request = self._observed.request

    def __enter__(self) -> Self:
        return self

    def response(self, response: InferenceResponse) -> None:
        self._timed.response(response)
        self._observed.response(response)

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if exc is None:
            self._ended("OK", None)
        elif isinstance(exc, GatewayError):
            self._failed(exc)
        elif isinstance(exc, RpcError | DecodeError):
            error = error_of_call(exc, self.request.model, is_repaired=self._health.stubs.are_repaired)
            self._failed(error)
            raise error from exc
        else:
            is_cancelled = isinstance(exc, asyncio.CancelledError | GeneratorExit)
            self._ended("CANCELLED" if is_cancelled else "UNKNOWN", None)

    def _failed(self, error: GatewayError) -> None:
        if error.upstream is not None:
            self._health.stubs.suspect(self.request.model, error.upstream.message, self._began)
        code = error.upstream.grpc_code if error.upstream else _CODE_WITHOUT_TRITON.get(type(error))
        self._ended(code or "UNKNOWN", error)

    def _ended(self, code: str, error: GatewayError | None) -> None:
        self._timed.ended(code, error)
        self._observed.ended(code, error)
