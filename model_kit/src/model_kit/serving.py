"""Connects a model's pure functions with Triton's Python backend."""

import asyncio  # noqa: F401 - else the backend imports it in the first execute of an instance: 20 ms of that request
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from model_kit.outcomes import Cancelled, ContractBroken, EarlyExit, InvalidInput, Overloaded
from model_kit.tensor_log import notes_on

Outputs = Mapping[str, np.ndarray]

# By name: the backend adds TritonError to its module only after a model has been imported.
CODE_BY_OUTCOME = {
    EarlyExit: "ALREADY_EXISTS",
    InvalidInput: "INVALID_ARG",
    ContractBroken: "INVALID_ARG",
    Overloaded: "UNAVAILABLE",
    Cancelled: "CANCELLED",
}


def answer_each(requests: Sequence[Any], answer: Callable[[Any], Outputs]) -> list[Any]:
    """Answers every request of a batch separately: a fault in one request does not affect the others.

    Args:
        requests: what Triton hands to ``execute``.
        answer: one request -> its output tensors by name; may raise EarlyExit or InvalidInput.
    """
    return [_response_of(request, answer) for request in requests]


def answer_batch(
    requests: Sequence[Any], read: Callable[[Any], Any], compute: Callable[[list[Any]], Iterable[Outputs]]
) -> list[Any]:
    """Answers a batch with one computation for all requests; an invalid request fails separately.

    Args:
        read: one request -> what is to be computed of it; may raise InvalidInput.
        compute: what was read -> the output tensors for each, in order.
    """
    read_ones = [_outcome_of(read, request) for request in requests]
    computed = iter(_computed([each for each in read_ones if not isinstance(each, Exception)], compute))
    outcomes = [each if isinstance(each, Exception) else next(computed) for each in read_ones]
    return [response_with(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]


def error_of(exc: Exception) -> Any:
    """Returns the TritonError for an exception; logs unexpected exceptions and reports them as ``internal``."""
    if type(exc) in CODE_BY_OUTCOME:
        return pb_utils.TritonError(_text_of(exc), getattr(pb_utils.TritonError, CODE_BY_OUTCOME[type(exc)]))
    pb_utils.Logger.log_error("".join(traceback.format_exception(exc)))
    return pb_utils.TritonError("internal", pb_utils.TritonError.INTERNAL)


def response_with(request: Any, outcome: Outputs | Exception) -> Any:
    """Returns the response for an outcome."""
    if isinstance(outcome, Exception):
        return pb_utils.InferenceResponse(error=error_of(outcome))
    notes_on(request)(outcome)
    return pb_utils.InferenceResponse(tensors_of(outcome))


def tensors_of(outputs: Outputs) -> list[Any]:
    return [pb_utils.Tensor(name, array) for name, array in outputs.items()]


def input_of(request: Any, name: str) -> np.ndarray | None:
    """The input as an array (BYTES: dtype object, elements ``bytes``), or None where an optional one was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def bytes_tensor(values: Sequence[bytes], shape: Sequence[int]) -> np.ndarray:
    """A BYTES tensor that keeps its rank when it is empty."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = list(values)
    return array.reshape(shape)


def _text_of(exc: Exception) -> str:
    """Adds the model's name to an error about an input, because an ensemble does not report which step rejected it."""
    if isinstance(exc, ContractBroken):
        return exc.text.format(model=_model_name())
    return f"{_model_name()}: {exc}" if isinstance(exc, InvalidInput) else str(exc)


def _model_name() -> str:
    return Path(pb_utils.get_model_dir()).parent.name


def _response_of(request: Any, answer: Callable[[Any], Outputs]) -> Any:
    return response_with(request, _outcome_of(answer, request))


def _outcome_of(function: Callable[[Any], Any], argument: Any) -> Any:
    """Returns the function's result or its exception."""
    try:
        return function(argument)
    except Exception as exc:
        return exc


def _computed(items: list[Any], compute: Callable[[list[Any]], Iterable[Outputs]]) -> list[Outputs | Exception]:
    results = _outcome_of(lambda these: list(compute(these)), items)
    return [results] * len(items) if isinstance(results, Exception) else results
