"""Converts the responses of one request to the caller's values, and determines how the answer ended."""

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from app.domain.errors import ContractViolation, GatewayError
from app.domain.inference import InferenceRequest, InferenceResponse
from app.pipelines.contract import ContractCheck
from app.pipelines.outputs import OutputField
from app.pipelines.pipeline import Pipeline

Values = dict[str, Any]


class Ending(Struct, frozen=True):
    """The end of a stream: the reason of an early exit, and the outputs that must still be written."""

    early_exit: str | None
    outputs: Sequence[Values] = ()


class Result(Struct, frozen=True):
    """The whole answer of a unary request."""

    values: Values
    early_exit: str | None


class Collector:
    """Collects the responses of one request, without I/O. After an error of :meth:`add`, add no further response.

    A stream takes the values of each response from :meth:`add`, then :meth:`finish`. A unary request passes each
    response to :meth:`join`, then takes :meth:`result`.
    """

    has_enough = False
    """Always False: the answer needs every response."""

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        self._pipeline = pipeline
        self._request_id = request.request_id
        self._fields = pipeline.outputs
        self._decoupled = pipeline.config.decoupled
        self._contract = ContractCheck(pipeline.contracts.of(request.parameters))
        self._texts = {
            field.name: codecs.getincrementaldecoder("utf-8")("replace") for field in self._fields if field.is_text_run
        }
        self._written: set[str] = set()
        self._filled: set[str] = set()
        self._joined: Values = {field.name: _start_of(field) for field in self._fields} if self._decoupled else {}

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the values of one response; None for a response without outputs. Raises ContractViolation."""
        if not response.outputs:
            return None
        self._contract.check(response)
        self._written.update(response.outputs)
        if self._pipeline.rules:
            self._filled.update(name for name, tensor in response.outputs.items() if tensor.array.size)
        values = {field.name: self._value_of(field, response) for field in self._fields}
        if response.is_final and self._texts:
            for name, rest in self._rests_of_text().items():
                values[name] = (values[name] or "") + rest
        return values

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Called after the last response, or after an error.

        An early exit before any output has the empty result. Raises the error for the caller, or ContractViolation if
        a model that is not decoupled omitted an output.
        """
        if error is not None:
            return self._exit_with(self._pipeline.early_exit_of(error, self._request_id))
        rules = self._pipeline.rules
        reason = rules.reason_of_outputs(self._written, self._written - self._filled) if rules else None
        if reason is None and not self._decoupled:
            self._check_complete()
        rests = self._rests_of_text() if self._texts else None
        return Ending(reason, [{**self.empty_values(), **rests}]) if rests else self._exit_with(reason)

    def join(self, response: InferenceResponse) -> None:
        """Adds a response to the result, with each output's ``join`` for decoupled models. Raises as :meth:`add`."""
        self._join(self.add(response))

    def result(self, error: GatewayError | None = None) -> Result:
        """Returns the joined result. Raises the errors of :meth:`finish`."""
        ending = self.finish(error)
        for rest in ending.outputs:
            self._join(rest)
        values = {name: _whole(value) for name, value in self._joined.items()} if self._decoupled else self._joined
        return Result(values, ending.early_exit)

    def empty_values(self) -> Values:
        """The typed empty value of every output."""
        return {field.name: self._empty_value(field) for field in self._fields}

    def _exit_with(self, reason: str | None) -> Ending:
        return Ending(reason, [self.empty_values()] if reason is not None and not self._written else ())

    def _check_complete(self) -> None:
        absent = [field.tensor.name for field in self._fields if field.tensor.name not in self._written]
        if absent:
            raise ContractViolation(
                f"Output '{absent[0]}' was not written.",
                tensor=absent[0],
                hint="If the model may omit it, declare an early_exit rule with missing: [...] in gateway.yaml.",
            )

    def _value_of(self, field: OutputField, response: InferenceResponse) -> Any:
        tensor = response.outputs.get(field.tensor.name)
        array = None if tensor is None else field.array_of(tensor)
        if array is None or not array.size:
            return self._empty_value(field)
        text = self._texts.get(field.name)
        return field.value_of(array) if text is None else text.decode(array.flat[0])

    def _rests_of_text(self) -> Values:
        """Returns U+FFFD for each remaining byte of an incomplete character."""
        rests = {name: decoder.decode(b"", final=True) for name, decoder in self._texts.items()}
        return {name: rest for name, rest in rests.items() if rest}

    def _empty_value(self, field: OutputField) -> Any:
        return "" if self._decoupled and field.is_text_run else field.empty_value

    def _join(self, values: Values | None) -> None:
        if values is None:
            return
        if not self._decoupled:
            self._joined = values
            return
        for field in self._fields:
            self._joined[field.name] = _joined(field, self._joined[field.name], values[field.name])


def _start_of(field: OutputField) -> Any:
    """The initial value for :meth:`Collector.join` with a decoupled model."""
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
    so_far.extend(value if isinstance(value, list) and not field.is_bare else [value])
    return so_far


def _whole(joined: Any) -> Any:
    """Joins the arrays of all responses to one array, or to a list of their items if the shapes differ."""
    if not isinstance(joined, list) or not joined or not isinstance(joined[0], np.ndarray):
        return joined
    if len({array.shape[1:] for array in joined}) == 1:
        return np.concatenate(joined)
    return [item for array in joined for item in array]
