"""Converts the body of a generate request to a ParsedRequest, and the model's responses to JSON.

Each member of a body is an input of the model, by its name, or a request parameter. An answer is an object for each
response, with a value for each output. Source: Triton's generate extension.
"""

import codecs
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from app.api.error_table import headers_of
from app.api.oip.infer import ParsedRequest, check_id, data_of
from app.api.oip.oip_errors import is_of_model, message_of, status_of
from app.api.oip.signature import Input, Signature, parameter_of
from app.api.responses import JsonResponse
from app.codecs.json_scan import WHITESPACE, members_of
from app.core.answer import Answer, Ending, Values
from app.core.errors import GatewayError, InvalidInput, InvalidRequest
from app.core.inference import BYTES, InferenceResponse, Parameter, Tensor
from app.core.text import shown

_id = msgspec.json.Decoder(str)
_MAX_BLANK = 1024
"""Limit of the white space before a list, in bytes."""


def generation_of(body: memoryview, signature: Signature, version: str) -> ParsedRequest:
    """Converts the body of a generate request. Members of ``parameters`` are treated like members of the object.

    Raises InvalidJson, InvalidRequest or InvalidInput.
    """
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Parameter] = {}
    own_id = ""
    for name, text in _members_of(body):
        if name in signature.inputs:
            if name in tensors:
                raise InvalidInput(f"input '{name}' already exists in request")
            tensors[name] = _tensor_of(signature.inputs[name], text)
        elif name == "id":
            try:
                own_id = _id.decode(text)
            except ValueError as exc:
                raise InvalidInput("Unable to parse 'id': attempt to access JSON non-string as string") from exc
        elif name in parameters:
            raise InvalidInput(f"parameter '{shown(name)}' is given twice.")
        else:
            parameters[name] = parameter_of(name, text)
    check_id(own_id)
    given = tuple(tensors.values())
    signature.check_inputs(given)
    return ParsedRequest(signature.request_of(given, version, parameters), own_id)


def _members_of(body: memoryview) -> Iterator[tuple[str, memoryview]]:
    """The members of the object and of ``parameters``, with duplicates. Raises the errors of ``members_of``."""
    for name, text in members_of(body):
        if name != "parameters":
            yield name, text
            continue
        try:
            yield from members_of(text)
        except InvalidRequest as exc:
            raise InvalidInput("Expected JSON object for keyword: 'parameters'.") from exc


def _tensor_of(known: Input, text: memoryview) -> Tensor:
    """``text``: one element, or a flat list of them. The last free dimension gets them; other free ones are 1.

    Raises InvalidInput or InvalidJson.
    """
    if not bytes(text[:_MAX_BLANK]).lstrip(WHITESPACE).startswith(b"["):
        text = memoryview(b"".join((b"[", text, b"]")))
    tensor = known.of_list(text)
    size, shape = tensor.array.size, [1 if dim == -1 else dim for dim in known.dims]
    if -1 in known.dims and (others := math.prod(shape)):
        shape[len(shape) - 1 - known.dims[::-1].index(-1)] = size // others
    if math.prod(shape) != size:
        raise InvalidInput(f"The schema can not convert input '{known.spec.name}' to tensor with proper shape.")
    known.check_shape(tuple(shape))
    return Tensor(tensor.name, tensor.datatype, tensor.array.reshape(shape))


EVENTS = "text/event-stream; charset=utf-8"


class Generated(Answer):
    """The answer of a stream: the values of each response.

    A character that is split between responses stays whole.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        own_id = {"id": parsed.id} if parsed.id else {}
        self._frame: Values = own_id | {"model_name": parsed.inference.model, "model_version": ""}
        self._texts: dict[str, codecs.IncrementalDecoder] = {}

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the values of a response; None for a response without outputs."""
        if not response.outputs:
            return None
        self._frame["model_version"] = response.version
        return {name: self._value_of(tensor) for name, tensor in response.outputs.items()} | self._frame

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Returns a last output if bytes of an incomplete character remain. Raises ``error``."""
        super().finish(error)
        rests = {name: rest for name, text in self._texts.items() if (rest := text.decode(b"", final=True))}
        return Ending(outputs=[rests | self._frame] if rests else ())

    def _value_of(self, tensor: Tensor) -> Any:
        if tensor.array.size != 1:
            return data_of(tensor)
        if tensor.datatype == BYTES:
            if tensor.name not in self._texts:
                self._texts[tensor.name] = codecs.getincrementaldecoder("utf-8")("replace")
            return self._texts[tensor.name].decode(tensor.array.item())
        return data_of(tensor).item()


def values_of(parsed: ParsedRequest, response: InferenceResponse) -> Values:
    """Returns the values of the only response."""
    generated = Generated(parsed)
    values = generated.add(response) or {}
    for rests in generated.finish().outputs:
        values |= {name: values[name] + rest for name, rest in rests.items() if name in response.outputs}
    return values


def generate_error_response(error: GatewayError, _request_id: str) -> Response:
    return JsonResponse(error_object(error), _status_of(error), headers_of(error))


def stream_error_response(error: GatewayError, _request_id: str) -> Response:
    """Answers an error of the model with an event, as Triton does, and every other error with JSON."""
    if not is_of_model(error):
        return generate_error_response(error, _request_id)
    return Response(b"data: %b\n\n" % orjson.dumps(error_object(error)), _status_of(error), media_type=EVENTS)


def error_object(error: GatewayError, _request_id: str = "") -> Values:
    return {"error": message_of(error)}


def _status_of(error: GatewayError) -> int:
    """Triton 2.51 answers 400 for every error of a model, because a stream does not transport the error's code."""
    return 400 if is_of_model(error) else status_of(error)
