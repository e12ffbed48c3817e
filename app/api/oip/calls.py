"""Calls of models by their own names: admission, the call itself, and what is written on the request's record."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from functools import partial

from msgspec.structs import replace

from app.admission.admission import ModelLoad, PipelineAdmission
from app.admission.scheduler import Slot
from app.api.access import check_model
from app.api.exchange import Exchange
from app.api.inference import Inference, StreamFormat, StreamRecorder
from app.api.oip.errors import is_of_model
from app.api.oip.infer import ParsedRequest
from app.api.oip.signature import Signature
from app.core.errors import DeadlineExceeded, GatewayError, InvalidRequest, ModelNotReady, UnknownModel
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import Capacity, ModelConfig
from app.observability.metrics import NO_PIPELINE
from app.pipelines.error_hints import public_text
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import StreamSpec
from app.streams.events import Event
from app.streams.stream import Stream, StreamPlan

ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, and so does infer; "
    "call generate_stream for a model that sends any number of responses."
)
"""Begins as Triton's text."""


class ModelCalls:
    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self._signatures: dict[str, Signature] = {}
        self._entrances: dict[str, tuple[Capacity, Mapping[str, int], PipelineAdmission]] = {}

    @property
    def timeout_s(self) -> float:
        return self.inference.catalog.surroundings.timeout_s

    def admit(self, exchange: Exchange, model: str, transport: str) -> Signature:
        """The request counts as work until its last byte is sent, under no pipeline's name.

        Raises Forbidden, Draining, UnknownModel or ModelNotReady.
        """
        exchange.record.transport = transport
        check_model(exchange, self.inference.catalog, model)
        signature = self._signature_of(model)
        self.inference.workload.begin(exchange.work)
        return signature

    def _signature_of(self, model: str) -> Signature:
        """Compiled when the configuration is first used."""
        exposed = self.inference.catalog.exposed
        config, rules, known = exposed.config(model), exposed.rules(model), self._signatures.get(model)
        if known is None or known.config is not config or known.rules is not rules:
            known = self._signatures[model] = Signature.compile(config, rules)
        return known

    async def answer(
        self, exchange: Exchange, signature: Signature, request: InferenceRequest, deadline: Deadline
    ) -> InferenceResponse:
        """The one response. Calls the ``cancel`` model of a pipeline over the model if the call is abandoned."""
        with await self._take_slot(exchange, signature.config.name, deadline) as slot:
            return await self._answer(exchange, signature, request, deadline, slot)

    async def _answer(
        self, exchange: Exchange, signature: Signature, request: InferenceRequest, deadline: Deadline, slot: Slot
    ) -> InferenceResponse:
        record = exchange.record
        record.triton_request_id = request.request_id
        if request.model in self.inference.catalog.exposed.idempotent:
            request = replace(request, idempotent=True)
        started = time.perf_counter()
        try:
            return await self._response(signature.config, request.with_trace(record.trace), deadline, slot)
        except (asyncio.CancelledError, DeadlineExceeded):
            self.abandon(request)
            raise
        except ModelNotReady as exc:
            raise _error_of(exc, request) from exc
        except GatewayError as exc:
            self.complete(exc, request.model)
            raise
        finally:
            record.triton_s = time.perf_counter() - started

    def check_load(self, exchange: Exchange, signature: Signature, deadline: Deadline) -> None:
        """Raises TooManyRequests if the request would be refused now. Call it before the body is read."""
        self._entrance_of(signature.config.name).check(exchange.caller, deadline)

    def _entrance_of(self, model: str) -> PipelineAdmission:
        """Uses the same queue as the pipelines over the model."""
        exposed = self.inference.catalog.exposed
        known, capacity = self._entrances.get(model), exposed.capacity(model)
        if known is not None and known[0] is capacity and known[1] is exposed.in_flight:
            return known[2]
        load = ModelLoad(model, capacity, exposed.in_flight.get(model))
        entrance = self.inference.admission.entrance(NO_PIPELINE, load)
        self._entrances[model] = capacity, exposed.in_flight, entrance
        return entrance

    def _take_slot(self, exchange: Exchange, model: str, deadline: Deadline) -> Awaitable[Slot]:
        return self.inference.take_slot_at(self._entrance_of(model), exchange.caller, deadline, exchange.record)

    async def _response(
        self, config: ModelConfig, request: InferenceRequest, deadline: Deadline, slot: Slot
    ) -> InferenceResponse:
        if not config.decoupled:
            return await self.inference.engine.infer(request, deadline)
        only: InferenceResponse | None = None
        async with aclosing(self.inference.engine.infer_stream(request, deadline)) as responses:
            async for response in responses:
                slot.output()
                if response.outputs and only is not None:
                    self.abandon(request)
                    raise InvalidRequest(ONE_RESPONSE)
                only = response if response.outputs else only
        if only is None:
            raise InvalidRequest(ONE_RESPONSE)
        return only

    async def open_stream(
        self, exchange: Exchange, asked: ParsedRequest, deadline: Deadline, writing: StreamFormat
    ) -> tuple[Stream, list[Event]]:
        """A started stream and its first events. Raises the error of a stream that failed before its first output."""
        inference, record, spec = self.inference, exchange.record, StreamSpec()
        request = replace(asked.inference, ends_by_hook=self.hook_of(asked.inference.model) is not None)
        record.triton_request_id = request.request_id
        slot = await self._take_slot(exchange, request.model, deadline)
        recorder = StreamRecorder(inference, NO_PIPELINE, record, partial(self.abandon, request.without_inputs()), slot)
        plan = StreamPlan(
            request_id=record.request_id,
            responses=inference.engine.infer_stream(request.with_trace(recorder.span.trace), deadline),
            answer=writing.answer,
            deadline=deadline,
            progress_s=spec.progress_s,
            lag_s=spec.lag_s,
            problem_of=writing.problem_of,
            observer=recorder,
        )
        stream = Stream(plan)
        try:
            return stream, await inference.opened(stream, NO_PIPELINE, None)
        except ModelNotReady as exc:
            raise _error_of(exc, request) from exc
        except GatewayError as exc:
            self.complete(exc, request.model)
            raise

    def complete(self, error: GatewayError, model: str) -> None:
        """Names the model in an error of it, or shows its own message if the operator allows that. Idempotent."""
        named = f"Model '{model}' failed: "
        if error.upstream is None or not is_of_model(error):
            return
        if self.inference.catalog.surroundings.exposes_oip_errors:
            error.detail, error.hint = public_text(error.upstream.message), None
        elif error.fault is not None and not error.detail.startswith(named):
            error.detail = named + error.detail[0].lower() + error.detail[1:]

    def abandon(self, request: InferenceRequest) -> None:
        """Stops a step that Triton would not stop, where a pipeline over the same model says how."""
        pipeline = self.hook_of(request.model)
        if pipeline is not None:
            self.inference.canceller.cancel(pipeline, request)

    def hook_of(self, model: str) -> Pipeline | None:
        """A pipeline over the model that declares ``cancel``."""
        entries = self.inference.catalog.entries.values()
        pipelines = (entry.pipeline for entry in entries if entry.pipeline is not None)
        return next((each for each in pipelines if each.spec.model == model and each.spec.cancel is not None), None)


def _error_of(error: ModelNotReady, request: InferenceRequest) -> ModelNotReady | UnknownModel:
    """A version that Triton does not have is the caller's mistake; a model that is being loaded is not."""
    is_unknown = error.upstream is not None and error.upstream.grpc_code in {"NOT_FOUND", None} and request.version
    return UnknownModel.named(request.model, request.version) if is_unknown else error
