"""The answer of a pipeline with ``batch``: the items run as parts, and the answers are joined in order."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from app.core.answer import Ending
from app.core.batch import BatchPart, JoinedRows, OneVersion, check_rows, items_of, part_of, ranges_of
from app.core.errors import GatewayError
from app.core.inference import InferenceRequest, InferenceResponse
from app.pipelines.outputs import OutputField
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer


class PipelineBatch:
    """The parts of a unary request. Implements :class:`app.core.batch.Batch`.

    A decoupled model gets one item at a time, because Triton does not tell to which row a response belongs. An early
    exit of a part is that of each of its items.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        count = items_of(request)
        self.pipeline = pipeline
        self.version = OneVersion()
        self._request = request
        self._ranges = ranges_of(count, pipeline.call_items)
        self._joined = {field.name: JoinedRows(count) for field in pipeline.outputs}
        self._exits: list[str | None] = [None] * count

    def __len__(self) -> int:
        return len(self._ranges)

    def parts(self) -> Iterator[BatchPart]:
        for items in self._ranges:
            request = part_of(self._request, items)
            yield BatchPart(items, request, _PartAnswer(self, items, request))

    def put(self, items: range, ending: Ending, rows: dict[str, int]) -> None:
        """``rows``: by tensor, the size of the first dimension. Raises ContractViolation."""
        (values,) = ending.outputs
        for field in self.pipeline.outputs:
            value = values[field.name]
            if self.pipeline.config.decoupled:
                value = [value]
            elif self._is_empty(value):
                value = self._empty_items(field, items, rows, has_exit=ending.early_exit is not None)
            elif len(self) > 1:
                check_rows(field.tensor.name, len(value), items)
            self._joined[field.name].put(items, value)
        self._exits[items.start : items.stop] = [ending.early_exit] * len(items)

    def finish(self) -> Ending:
        exits = self._exits if self.pipeline.rules else None
        reason = self._exits[0] if None not in self._exits else None
        return Ending(reason, ({name: joined.value for name, joined in self._joined.items()},), exits)

    def _is_empty(self, value: Any) -> bool:
        return isinstance(value, list | np.ndarray) and not len(value)

    def _empty_items(self, field: OutputField, items: range, rows: dict[str, int], *, has_exit: bool) -> Sequence[Any]:
        """The empty value of each item. Raises ContractViolation for an output without rows."""
        if not has_exit and len(self) == 1:
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
