"""The answer of a pipeline with ``batch``: the items run as parts, and the answers are joined in order."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from app.core.answer import Answer, Ending, Values
from app.core.batch import Batch, BatchPart, check_rows, joined_rows
from app.core.errors import GatewayError
from app.core.inference import InferenceRequest, InferenceResponse
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector, WholeAnswer
from app.pipelines.spec import INDEX


class StreamedBatch(Batch):
    """The outputs of a stream with ``batch``.

    Each output has the number of its item as ``index``; if the model takes several items at a time, that of the first
    item of the part. An early exit of a part is that of each of its items.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(request, pipeline.call_items)
        self._pipeline = pipeline
        self._exits: list[str | None] = [None] * self.count

    def answer_of(self, part: BatchPart) -> Answer:
        return Collector(self._pipeline, part.request)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Batch.add`."""
        values = super().add(response)
        return None if values is None else {INDEX: response.choice, **values}

    def put(self, items: range, answer: Answer, ending: Ending) -> Values | None:
        self._exits[items.start : items.stop] = [ending.early_exit] * len(items)
        return next(iter(ending.outputs), None)

    def finish(self, error: GatewayError | None = None) -> Ending:
        """The whole request is an early exit if each of its items is. Raises the error."""
        super().finish(error)
        exits = self._exits
        return Ending(None if None in exits else exits[0], (), exits) if self._pipeline.rules else Ending()


class _PartAnswer(WholeAnswer):
    rows: Mapping[str, int] = MappingProxyType({})
    """By tensor, the size of the first dimension."""

    def add(self, response: InferenceResponse) -> None:
        """Raises the errors of :meth:`WholeAnswer.add`."""
        self.rows = {name: tensor.shape[0] if tensor.shape else 0 for name, tensor in response.outputs.items()}
        super().add(response)


class PipelineBatch(StreamedBatch):
    """The answer of a unary request.

    A decoupled model gets one item at a time, because Triton does not tell to which row a response belongs.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(pipeline, request)
        self._rows: dict[str, dict[int, Any]] = {field.name: {} for field in pipeline.outputs}
        """By output, the rows of each part, by its first item."""

    def answer_of(self, part: BatchPart) -> Answer:
        return _PartAnswer(self._pipeline, part.request)

    def put(self, items: range, answer: Answer, ending: Ending) -> None:
        """Raises ContractViolation for rows that are not the items."""
        assert isinstance(answer, _PartAnswer)
        (values,) = ending.outputs  # of a model that is not decoupled, each is a list or an array of rows
        for field in self._pipeline.outputs:
            value, has_exit = values[field.name], ending.early_exit is not None
            if self._pipeline.config.decoupled:
                value = [value]
            elif len(value) == 0 and (has_exit or self.has_several):
                if not has_exit:
                    check_rows(field.tensor.name, answer.rows.get(field.tensor.name, 0), items)
                value = [field.empty_item] * len(items)
            elif self.has_several:
                check_rows(field.tensor.name, len(value), items)
            self._rows[field.name][items.start] = value
        super().put(items, answer, ending)

    def finish(self, error: GatewayError | None = None) -> Ending:
        ending = super().finish(error)
        joined = {name: joined_rows([rows for _, rows in sorted(parts.items())]) for name, parts in self._rows.items()}
        return Ending(ending.early_exit, [joined], self._exits)


def answer_of(pipeline: Pipeline, request: InferenceRequest) -> Answer:
    """The answer of a unary request."""
    return WholeAnswer(pipeline, request) if pipeline.batch is None else PipelineBatch(pipeline, request)


def streamed_answer_of(pipeline: Pipeline, request: InferenceRequest) -> Answer:
    """The answer of a stream."""
    return Collector(pipeline, request) if pipeline.batch is None else StreamedBatch(pipeline, request)
