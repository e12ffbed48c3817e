"""The answer of a pipeline with ``batch``: the items run as parts, and the answers are joined in order."""

from collections.abc import Callable, Sequence
from typing import Any

from app.core.answer import Answer, Ending, Tokens, Values
from app.core.batch import Batch, BatchPart, JoinedRows, PartEnd, WholeBatch, check_rows
from app.core.errors import GatewayError
from app.core.inference import InferenceRequest, InferenceResponse
from app.pipelines.outputs import OutputField
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector, WholeAnswer
from app.pipelines.spec import INDEX


class PipelineBatch(WholeBatch):
    """The parts of a unary request. Implements :class:`app.core.batch.Batch`.

    A decoupled model gets one item at a time, because Triton does not tell to which row a response belongs. An early
    exit of a part is that of each of its items.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(request, pipeline.call_items)
        self.pipeline = pipeline
        self._joined = {field.name: JoinedRows(self.count) for field in pipeline.outputs}
        self._exits: list[str | None] = [None] * self.count

    def part(self, items: range, request: InferenceRequest) -> BatchPart:
        return BatchPart(items, request, _PartAnswer(self, items, request))

    def put(self, items: range, ending: Ending, rows: dict[str, int]) -> None:
        """``rows``: by tensor, the size of the first dimension. Raises ContractViolation."""
        (values,) = ending.outputs  # of a model that is not decoupled, each is a list or an array of rows
        for field in self.pipeline.outputs:
            value = values[field.name]
            if self.pipeline.config.decoupled:
                value = [value]
            elif len(value) == 0:
                value = self._empty_items(field, items, rows, has_exit=ending.early_exit is not None)
            elif self.has_several:
                check_rows(field.tensor.name, len(value), items)
            self._joined[field.name].put(items, value)
        self._exits[items.start : items.stop] = [ending.early_exit] * len(items)

    def finish(self) -> Ending:
        return _ending_of(self._exits, {name: joined.value for name, joined in self._joined.items()})

    def _empty_items(self, field: OutputField, items: range, rows: dict[str, int], *, has_exit: bool) -> Sequence[Any]:
        """The empty value of each item. Raises ContractViolation for an output without rows."""
        if not has_exit and not self.has_several:
            return []
        if not has_exit:
            check_rows(field.tensor.name, rows.get(field.tensor.name, 0), items)
        return [field.empty_item] * len(items)


class _PartAnswer(WholeAnswer):
    def __init__(self, batch: PipelineBatch, items: range, request: InferenceRequest) -> None:
        super().__init__(batch.pipeline, request)
        self._batch = batch
        self._items = items
        self._rows: dict[str, int] = {}

    def add(self, response: InferenceResponse) -> None:
        """Raises ModelChanged, and the errors of :meth:`WholeAnswer.add`."""
        self._batch.version.check(response)
        self._rows = {name: tensor.shape[0] if tensor.shape else 0 for name, tensor in response.outputs.items()}
        super().add(response)

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`WholeAnswer.finish`, or ContractViolation for rows that are not the items."""
        ending = super().finish(error)
        self._batch.put(self._items, ending, self._rows)
        return ending


class StreamedBatch(WholeBatch, Answer):
    """The outputs of a stream with ``batch``. Implements :class:`app.core.batch.Batch`.

    Each output has the number of its item as ``index``; if the model takes several items at a time, that of the first
    item of the part.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(request, pipeline.call_items)
        self._pipeline = pipeline
        self._running: dict[int, tuple[BatchPart, Collector]] = {}
        """By the number of the part's first item."""
        self._tokens: Tokens | None = None
        self._exits: list[str | None] = [None] * self.count

    @property
    def tokens(self) -> Tokens | None:
        """Those of the parts that have ended."""
        return self._tokens

    def part(self, items: range, request: InferenceRequest) -> BatchPart:
        collector = Collector(self._pipeline, request)
        part = BatchPart(items, request, collector)
        self._running[items.start] = part, collector
        return part

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises ModelChanged, and the errors of :class:`Collector`, which name the items of their part."""
        part, collector = self._running[response.choice]
        try:
            values = self._end(part, collector, response.error) if isinstance(response, PartEnd) else None
            if values is None and response.outputs:
                self.version.check(response)
                values = collector.add(response)
        except GatewayError as exc:
            if self.has_several:
                part.fail(exc)
            raise
        return None if values is None else {INDEX: response.choice, **values}

    def _end(self, part: BatchPart, collector: Collector, error: GatewayError | None) -> Values | None:
        """Returns the last output of the part; None if there is none."""
        del self._running[part.items.start]
        ending = collector.finish(error)
        if collector.tokens is not None:
            self._tokens = collector.tokens if self._tokens is None else self._tokens + collector.tokens
        self._exits[part.items.start : part.items.stop] = [ending.early_exit] * len(part.items)
        return next(iter(ending.outputs), None)

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the error."""
        if error is not None:
            raise error
        return _ending_of(self._exits) if self._pipeline.rules else Ending()


def _ending_of(exits: Sequence[str | None], *outputs: Values) -> Ending:
    """``exits``: of each item. The whole request is an early exit if each of its items is."""
    return Ending(None if None in exits else exits[0], outputs, exits)


Answering = tuple[Answer, Batch | None]
"""The answer of a request, and its parts with ``batch``, which then have the answer."""
AnswerOf = Callable[[Pipeline, InferenceRequest], Answering]


def answer_of(pipeline: Pipeline, request: InferenceRequest) -> Answering:
    """The answer of a unary request."""
    return WholeAnswer(pipeline, request), None if pipeline.batch is None else PipelineBatch(pipeline, request)


def streamed_answer_of(pipeline: Pipeline, request: InferenceRequest) -> Answering:
    """The answer of a stream."""
    if pipeline.batch is None:
        return Collector(pipeline, request), None
    batch = StreamedBatch(pipeline, request)
    return batch, batch
