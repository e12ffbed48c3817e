"""One unary run of a pipeline."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError, UpstreamUnavailable
from app.domain.inference import InferenceRequest
from app.pipelines.collector import Collector, Values
from app.pipelines.outputs import OutputField
from app.pipelines.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Result:
    values: Values
    early_exit: str | None
    triton_s: float
    """The time spent waiting for Triton."""


async def run(engine: Engine, pipeline: Pipeline, request: InferenceRequest, deadline: Deadline) -> Result:
    """Raises GatewayError; cancelling the task cancels the work in Triton."""
    collector = pipeline.collector(request)
    answer = (
        JoinedAnswer(collector, pipeline.outputs)
        if pipeline.config.decoupled
        else SingleAnswer(collector, may_retry=pipeline.spec.idempotent)
    )
    started = time.perf_counter()
    try:
        await answer.read(engine, request, deadline)
        reason = answer.finish()
    except GatewayError as exc:
        reason = collector.judge(exc)
    return Result(answer.values, reason, time.perf_counter() - started)


class SingleAnswer:
    """The one response of an ordinary model."""

    def __init__(self, collector: Collector, *, may_retry: bool) -> None:
        self._collector = collector
        self._may_retry = may_retry
        self.values = collector.empty_values()

    async def read(self, engine: Engine, request: InferenceRequest, deadline: Deadline) -> None:
        """Once more, where nothing was received and the pipeline says that a repeated request does no harm."""
        try:
            response = await engine.infer(request, deadline)
        except UpstreamUnavailable:
            if not self._may_retry:
                raise
            response = await engine.infer(request, deadline)
        self.values = self._collector.add(response) or self.values

    def finish(self) -> str | None:
        return self._collector.finish().early_exit


class JoinedAnswer:
    """The responses of a decoupled model as one result, by each output's ``join``."""

    def __init__(self, collector: Collector, fields: Sequence[OutputField]) -> None:
        self._collector = collector
        self._fields = fields
        self.values: Values = {field.name: _start_of(field) for field in fields}

    async def read(self, engine: Engine, request: InferenceRequest, deadline: Deadline) -> None:
        async with aclosing(engine.infer_stream(request, deadline)) as responses:
            async for response in responses:
                self._add(self._collector.add(response))

    def finish(self) -> str | None:
        ending = self._collector.finish()
        self._add(ending.values)
        return ending.early_exit

    def _add(self, values: Values | None) -> None:
        if values is None:
            return
        for field in self._fields:
            self.values[field.name] = _joined(field, self.values[field.name], values[field.name])


def _start_of(field: OutputField) -> Any:
    if field.join == "last":
        return field.empty_value
    return "" if field.join == "concatenate" and field.is_bare else []


def _joined(field: OutputField, so_far: Any, value: Any) -> Any:
    if value is None:
        return so_far
    if field.join == "last":
        return value
    if isinstance(so_far, str):
        return so_far + value
    so_far.extend([value] if field.is_bare else value)
    return so_far
