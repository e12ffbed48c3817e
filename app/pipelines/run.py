"""Runs one unary request of a pipeline."""

from contextlib import aclosing

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError, UpstreamUnavailable
from app.domain.inference import InferenceRequest, InferenceResponse
from app.pipelines.collector import Collector, Result
from app.pipelines.pipeline import Pipeline


async def run(engine: Engine, pipeline: Pipeline, request: InferenceRequest, deadline: Deadline) -> Result:
    """Raises GatewayError; cancelling the task cancels the work in Triton."""
    collector = Collector(pipeline, request)
    try:
        if pipeline.config.decoupled:
            async with aclosing(engine.infer_stream(request, deadline)) as responses:
                async for response in responses:
                    collector.join(response)
        else:
            collector.join(await _infer(engine, request, deadline, may_retry=pipeline.spec.idempotent))
        return collector.result()
    except GatewayError as exc:
        return collector.result(exc)


async def _infer(
    engine: Engine, request: InferenceRequest, deadline: Deadline, *, may_retry: bool
) -> InferenceResponse:
    """Retries once if Triton did not receive the request and the pipeline is declared idempotent."""
    try:
        return await engine.infer(request, deadline)
    except UpstreamUnavailable as exc:
        if exc.was_sent or not may_retry:
            raise
        return await engine.infer(request, deadline)
