"""The values of a request, by field name -> the request to the model. Compiled for one pipeline."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.domain.errors import FieldProblem, InvalidInput
from app.domain.inference import InferenceRequest, Parameter
from app.domain.tensor import Tensor
from app.pipelines.fields import InputField, ParameterField
from app.pipelines.spec import PipelineSpec

_Problems = list[FieldProblem]


class RequestBuilder:
    """``max_batch_size``: of the model. It limits the items of a request where the pipeline says ``batch: true``."""

    def __init__(
        self,
        spec: PipelineSpec,
        inputs: Sequence[InputField],
        parameters: Sequence[ParameterField],
        max_batch_size: int,
        *,
        takes_traceparent: bool = False,
    ) -> None:
        self._model = spec.model
        self._version = spec.version
        self._ends_by_hook = spec.cancel is not None
        self._idempotent = spec.idempotent
        self._takes_traceparent = takes_traceparent
        self._max_items = max_batch_size if spec.batch else None
        self._inputs = tuple(inputs)
        self._tensor_parameters = tuple(field for field in parameters if field.tensor is not None)
        self._request_parameters = tuple(field for field in parameters if field.tensor is None)

    def request_of(self, values: Mapping[str, Any]) -> InferenceRequest:
        """A request whose types, shapes and data agree. Raises InvalidInput."""
        problems: _Problems = []
        tensors = self._input_tensors(values, problems)
        batch_size = 1 if self._max_items is None else _batch_size(tensors, self._max_items, problems)
        if self._tensor_parameters:
            tensors += self._parameter_tensors(values, batch_size, problems)
        parameters = self._parameter_values(values, problems) if self._request_parameters else {}
        if problems:
            raise InvalidInput(f"'{problems[0].field}' {problems[0].problem}.", errors=problems)
        return InferenceRequest(
            model=self._model,
            version=self._version,
            inputs=tuple(tensors),
            parameters=parameters,
            ends_by_hook=self._ends_by_hook,
            idempotent=self._idempotent,
            takes_traceparent=self._takes_traceparent,
        )

    def _input_tensors(self, values: Mapping[str, Any], problems: _Problems) -> list[Tensor]:
        tensors: list[Tensor] = []
        for field in self._inputs:
            value = values.get(field.name)
            try:
                tensor = field.default if value is None else field.read(value)
            except ValueError as exc:
                problems.append(FieldProblem(field.name, str(exc)))
                continue
            if tensor is not None:
                tensors.append(tensor)
        return tensors

    def _parameter_tensors(self, values: Mapping[str, Any], batch_size: int, problems: _Problems) -> Iterable[Tensor]:
        for field in self._tensor_parameters:
            value = values.get(field.name, field.spec.default)
            if value is None:
                continue
            try:
                yield field.read(value, batch_size)
            except ValueError as exc:
                problems.append(FieldProblem(field.name, str(exc)))

    def _parameter_values(self, values: Mapping[str, Any], problems: _Problems) -> dict[str, Parameter]:
        parameters: dict[str, Parameter] = {}
        for field in self._request_parameters:
            value = values.get(field.name, field.spec.default)
            if value is None:
                continue
            try:
                parameters[field.name] = field.checked(value)
            except ValueError as exc:
                problems.append(FieldProblem(field.name, str(exc)))
        return parameters


def _batch_size(tensors: Sequence[Tensor], most: int, problems: _Problems) -> int:
    """How many items the caller sent, the same of every input."""
    sizes = {tensor.shape[0] for tensor in tensors} or {1}
    size = sizes.pop()
    if sizes:
        problems.append(FieldProblem("batch", "has inputs with different numbers of items"))
    elif not 1 <= size <= most:
        problems.append(FieldProblem("batch", f"has {size} items; expected 1 to {most}"))
    return size
