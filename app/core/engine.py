"""The ports to an inference server: its inferences (``Engine``), and its models and health (``InferenceServer``).

The interfaces for layers around the engine, which do something with a pipeline's requests, and for observers of
inference calls: metrics, the tensor log, tracing, the health of models.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from msgspec.structs import replace

from app.core.errors import GatewayError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, OpenSequence
from app.core.model import Finding, ModelConfig, ModelState

Document = Literal["metadata", "config", "stats", "server"]
"""The documents about a model, as named by the Open Inference Protocol, and that about the server."""


class Engine(Protocol):
    """Runs inferences. Every method raises only errors of :mod:`app.core.errors`."""

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Sends a request and returns its response. Cancelling the awaiting task cancels the call."""

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        """Sends a request and yields its responses as they arrive. Closing the generator cancels the call."""


class InferenceServer(Engine, Protocol):
    """Also knows its models and its health. Every method raises only errors of :mod:`app.core.errors`."""

    def states(self) -> Mapping[str, str]:
        """Returns the state of each server by address, in one word. Empty if there is one server."""
        return {}

    def absences(self, model: str, version: str = "") -> Mapping[str, str]:
        """Where the model is not called, and why not: address -> ``not_ready`` or ``other_signature``."""
        return {}

    def homes(self, model: str, version: str = "") -> Sequence[str]:
        """The servers where a sequence of the model may begin now, by address; one empty text for a single server."""
        return ("",)

    def fault(self, model: str) -> str:
        """Why a model that the server reports as ready is not, as a clause; empty without a known cause."""
        return ""

    async def is_live(self) -> bool:
        """Whether the server answers. Never raises."""

    async def models(self) -> Sequence[ModelState]:
        """Returns the repository index."""

    async def model_ready(self, model: str, version: str = "") -> bool: ...

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        """Returns the model's current configuration. Raises ModelNotReady."""

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        """Returns a document about the model, as the JSON of the HTTP endpoint. Raises UnknownModel.

        ``stats`` covers all models if ``model`` is empty; ``server`` ignores it.
        """


Call = Callable[[InferenceRequest, Deadline], AsyncGenerator[InferenceResponse]]
Put = Callable[[InferenceResponse], Awaitable[None]]


def responses_of(
    engine: Engine, requests: Sequence[InferenceRequest], deadline: Deadline, *, decoupled: bool
) -> AsyncGenerator[InferenceResponse]:
    """Runs all requests at the same time, and yields their responses as they arrive. Raises the first error.

    A model that is not decoupled is called unary: only then do its errors have a code, and one with a response sender
    never marks the end of a stream. The responses of a step of a sequence are read to their end, also if the caller
    closes the generator before.
    """
    call: Call = engine.infer_stream if decoupled else partial(_only_response, engine)
    if len(requests) == 1:
        responses, sequence = call(requests[0], deadline), requests[0].sequence
        return responses if sequence is None else _read_to_the_end(responses, sequence)

    async def read_all(put: Put) -> None:
        async def read(choice: int, request: InferenceRequest) -> None:
            async with aclosing(call(request, deadline)) as responses:
                async for response in responses:
                    await put(replace(response, choice=choice))

        async with asyncio.TaskGroup() as group:
            for choice, request in enumerate(requests):
                group.create_task(read(choice, request))

    return merged(read_all, len(requests))


async def _only_response(
    engine: Engine, request: InferenceRequest, deadline: Deadline
) -> AsyncGenerator[InferenceResponse]:
    """In a call of its own, because a stream does not show with whom it shares a call."""
    extensions = tuple(each for each in request.extensions if each.is_for_streams)
    yield await engine.infer(replace(request, extensions=extensions), deadline)


async def _read_to_the_end(
    responses: AsyncGenerator[InferenceResponse], sequence: OpenSequence
) -> AsyncGenerator[InferenceResponse]:
    """Closing the generator waits for the last response. Cancelling it cancels the call: the sequence is lost then."""
    try:
        async with aclosing(responses):
            try:
                async for response in responses:
                    yield response
            except GeneratorExit:
                async for _ in responses:
                    pass
                raise
    except asyncio.CancelledError:
        sequence.is_lost = True
        raise


async def merged(run: Callable[[Put], Awaitable[None]], size: int = 8) -> AsyncGenerator[InferenceResponse]:
    """Yields the responses that ``run`` puts, until it ends. Raises its error, the first one of a group.

    ``size``: how many responses may wait for the reader. Closing the generator cancels ``run``.
    """
    arrived = asyncio.Queue[InferenceResponse | Exception | None](size)

    async def fill() -> None:
        try:
            await run(arrived.put)
        except Exception as exc:
            error = exc.exceptions[0] if isinstance(exc, ExceptionGroup) else exc
            if isinstance(error, GatewayError):
                error.forget_frames()  # they refer to the queue, and to the request
            await arrived.put(error)
        else:
            await arrived.put(None)

    filling = asyncio.create_task(fill())
    try:
        while (item := await arrived.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


async def discard_stream(engine: Engine, request: InferenceRequest, deadline: Deadline) -> None:
    """Reads every response of a stream and discards it. Raises GatewayError."""
    async with aclosing(engine.infer_stream(request, deadline)) as responses:
        async for _ in responses:
            pass


class PipelineLayer:
    """A layer as one compiled pipeline uses it. This base class changes nothing."""

    needs_trial = False
    """Whether a version of the model answered that no trial has seen."""
    fault: Finding | None = None
    """Why it does nothing for the pipeline."""

    @property
    def requests(self) -> Mapping[tuple[str, ...], Mapping[str, Any]]:
        """The layer's own requests, by their key below the pipeline in gateway.yaml."""
        return {}

    def check(self, request: InferenceRequest) -> None:
        """Raises ClientError for a request to the model by its own name that the layer cannot run."""

    def extended(self, request: InferenceRequest) -> InferenceRequest:
        """Returns the request with the layer's extension."""
        return request

    async def run_trial(
        self, engine: Engine, declared: Sequence[InferenceRequest], varied: Sequence[InferenceRequest], timeout_s: float
    ) -> None:
        """Tries the model. ``declared``: the sample and the examples. ``varied``: requests made from the sample.

        Raises GatewayError if the model cannot be called now.
        """


@dataclass(eq=False)
class ObservedCall:
    """Observes one inference call. ``request``: the one that the engine sends. ``method``: see CallObserver."""

    request: InferenceRequest
    method: str
    response: ClassVar[Callable[[Any, InferenceResponse], None] | None] = None
    """A method that is called with each response, or None."""

    def ended(self, code: str, error: GatewayError | None) -> None:
        """Called exactly once at the end. ``code``: the gRPC status, ``CANCELLED`` if the caller disconnected."""


CallObserver = Callable[[InferenceRequest, str], ObservedCall]
"""Is called at the start of a call, with its method: ``ModelInfer`` or ``ModelStreamInfer``.

Each observer gets the request of the previous one."""
