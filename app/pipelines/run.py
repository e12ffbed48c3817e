"""Runs one unary request of a pipeline."""

from contextlib import aclosing
from typing import Protocol

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError
from app.domain.inference import InferenceRequest, InferenceResponse
from app.pipelines.collector import Collector, Result
from app.pipelines.pipeline import Pipeline


class Answer(Protocol):
    """Joins the responses of one request."""

    @property
    def has_enough(self) -> bool:
        """Whether the caller does not want the responses that follow."""

    def join(self, response: InferenceResponse) -> None: ...

    def result(self, error: GatewayError | None = None) -> Result:
        """After the last response that is wanted, or after the error that came instead of it."""


async def run(
    engine: Engine,
    pipeline: Pipeline,
    request: InferenceRequest,
    deadline: Deadline,
    answer: Answer | None = None,
) -> Result:
    """Raises GatewayError; cancelling the task cancels the work in Triton.

    ``answer``: what joins the responses; by default the pipeline's outputs.
    """
    answer = answer or Collector(pipeline, request)
    try:
        if pipeline.config.decoupled:
            async with aclosing(engine.infer_stream(request, deadline)) as responses:
                async for response in responses:
                    answer.join(response)
                    if answer.has_enough:
                        break
        else:
            answer.join(await engine.infer(request, deadline))
        return answer.result()
    except GatewayError as exc:
        return answer.result(exc)
