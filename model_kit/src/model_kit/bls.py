"""Functions for BLS models: calls to other models, with the codes of their errors restored."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from model_kit.child_errors import exception_of
from model_kit.outcomes import Cancelled, InvalidInput
from model_kit.serving import Outputs, response_with, tensors_of

# Every awaited call needs a thread, and asyncio's default pool has only a few, so that calls of one request would wait
# for those of another. Created while the model loads, not by the first request.
MAX_CHILDREN = 64
_waiting = ThreadPoolExecutor(MAX_CHILDREN, thread_name_prefix="child")


async def answer_together(requests: Sequence[Any], answer: Callable[[Any], Awaitable[Outputs]]) -> list[Any]:
    """Answers the requests of a batch concurrently, so that other requests run while one waits for a called model.

    As in ``serving.answer_each``, a fault in one request never affects another.
    """
    asyncio.get_running_loop().set_default_executor(_waiting)
    return list(await asyncio.gather(*(_response_of(request, answer) for request in requests)))


async def call(parent: Any, model: str, inputs: Outputs, outputs: Sequence[str], faults: Collection[str]) -> list[Any]:
    """Calls another model for ``parent``, with its request id, parameters and queue timeout.

    Args:
        faults: the called model's texts that mean InvalidInput, because BLS keeps only the text of an error.

    Returns:
        The named outputs as arrays, in the requested order.

    Raises:
        Cancelled: If the caller of ``parent`` has disconnected; then the model is not called.
        InvalidInput: If the model rejects its input, or ``parent`` has a float parameter, which BLS cannot pass on.
        Overloaded: If the model's queue is full.
        RuntimeError: For any other error of the model.
    """
    if parent.is_cancelled():
        raise Cancelled
    response = await _request(parent, model, inputs, outputs).async_exec()
    if response.has_error():
        raise exception_of(response.error().message().removeprefix(f"{model}: "), faults)
    return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in outputs]


def _request(parent: Any, model: str, inputs: Outputs, outputs: Sequence[str]) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        inputs=tensors_of(inputs),
        requested_output_names=list(outputs),
        request_id=parent.request_id(),
        timeout=parent.timeout(),
        trace=parent.trace(),
        parameters=_parameters_of(parent),
    )


def _parameters_of(parent: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = json.loads(parent.parameters())
    if any(isinstance(value, float) for value in parameters.values()):
        raise InvalidInput("a parameter is a number with a fraction, which Triton cannot pass on to the called models")
    return parameters


async def _response_of(request: Any, answer: Callable[[Any], Awaitable[Outputs]]) -> Any:
    try:
        return response_with(request, await answer(request))
    except Exception as exc:
        return response_with(request, exc)
