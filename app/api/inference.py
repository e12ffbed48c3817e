"""Between the routes and the work: runs a pipeline or opens its stream, and notes on the request's record what came."""

import asyncio
import functools
import time

from app.api.problems import problem_of
from app.api.state import Gateway
from app.domain.deadline import Deadline
from app.domain.errors import ClientClosedRequest, DeadlineExceeded
from app.domain.inference import InferenceRequest
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Result, run
from app.pipelines.spec import StreamSpec
from app.streams.event import Event
from app.streams.stream import Stream, StreamPlan


async def answer(
    gateway: Gateway, pipeline: Pipeline, inference: InferenceRequest, deadline: Deadline, record: RequestRecord
) -> Result:
    """One unary answer. What nobody waits for any more is also stopped inside Triton."""
    record.triton_request_id = inference.request_id
    started = time.perf_counter()
    try:
        result = await run(gateway.engine, pipeline, inference, deadline)
    except (asyncio.CancelledError, DeadlineExceeded):
        gateway.canceller.cancel(pipeline, inference)
        raise
    finally:
        record.triton_s = time.perf_counter() - started
    record.exit_early(result.early_exit)
    return result


async def open_stream(
    gateway: Gateway, pipeline: Pipeline, inference: InferenceRequest, deadline: Deadline, record: RequestRecord
) -> tuple[Stream, list[Event]]:
    """A started stream and its first events, none if it is still silent after ``commit_s``.

    Raises the error of a stream that failed before its first output: it still gets an HTTP status.
    """
    spec = pipeline.spec.stream or StreamSpec()
    record.triton_request_id = inference.request_id
    stream = Stream(
        StreamPlan(
            request_id=record.request_id,
            responses=gateway.engine.infer_stream(inference, deadline),
            answer=pipeline.collector(inference),
            progress_s=spec.progress_s,
            problem_of=functools.partial(problem_of, request_id=record.request_id),
            on_output=OutputTimes(gateway.metrics, pipeline.name, record.started).note,
            on_abandoned=functools.partial(gateway.canceller.cancel, pipeline, inference),
            on_end=functools.partial(_note_end, gateway, record),
        )
    )
    gateway.start_stream(stream, pipeline.name)
    try:
        opening = await _first_events(stream, spec.commit_s)
    except asyncio.CancelledError:
        stream.end(ClientClosedRequest("The client went away before the first output."))
        raise
    if opening and opening[0].name == "error" and stream.error is not None:
        raise stream.error
    return stream, opening


async def _first_events(stream: Stream, commit_s: float) -> list[Event]:
    try:
        async with asyncio.timeout(commit_s):
            return await stream.log.read()
    except TimeoutError:
        return []


def _note_end(gateway: Gateway, record: RequestRecord, stream: Stream) -> None:
    record.triton_s = max(record.duration_s - stream.own_s, 0.0)
    record.exit_early(stream.early_exit)
    if stream.error is not None:
        record.fail(stream.error)


class OutputTimes:
    """When the outputs of one stream came: time to the first, gaps between the others."""

    def __init__(self, metrics: Metrics, pipeline: str, started: float) -> None:
        self._first = metrics.time_to_first_output.labels(pipeline)
        self._gap = metrics.inter_output.labels(pipeline)
        self._count = metrics.stream_outputs.labels(pipeline)
        self._last = started
        self._seen_any = False

    def note(self) -> None:
        now = time.perf_counter()
        (self._gap if self._seen_any else self._first).observe(now - self._last)
        self._last, self._seen_any = now, True
        self._count.inc()
