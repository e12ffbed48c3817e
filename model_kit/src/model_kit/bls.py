"""What a BLS model needs around its script: calls to other models, and their errors under the right code again."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from model_kit.child_errors import exception_of
from model_kit.outcomes import Cancelled, InvalidInput
from model_kit.serving import Outputs, response_with, tensors_of

# Every child that is awaited holds a thread, and asyncio's own pool has a handful: with it, children of one request
# wait for those of another. Made while the model is loaded, not by the first request.
MAX_CHILDREN = 64
_waiting = ThreadPoolExecutor(MAX_CHILDREN, thread_name_prefix="child")


async def answer_together(requests: Sequence[Any], answer: Callable[[Any], Awaitable[Outputs]]) -> list[Any]:
    """Answer the requests of a batch at the same time, so that one's wait for a child is another's turn.

    Like ``serving.answer_each``: a fault in one request never reaches another.
    """
    asyncio.get_running_loop().set_default_executor(_waiting)
    return list(await asyncio.gather(*(_response_of(request, answer) for request in requests)))


async def call(parent: Any, model: str, inputs: Outputs, outputs: Sequence[str], faults: Collection[str]) -> list[Any]:
    """Run another model for ``parent``, under its request id, parameters and queue timeout.

    Args:
        faults: the child's texts that mean InvalidInput; BLS loses the code of an error and keeps its text.

    Returns:
        the named outputs as arrays, in the order asked for.

    Raises:
        Cancelled: the caller of ``parent`` has left, so the child is not started.
        InvalidInput: the child said so, or ``parent`` has a parameter of type float, which BLS cannot pass on.
        Overloaded: as the child said.
        RuntimeError: any other error of the child.
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
