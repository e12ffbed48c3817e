"""Renders responses as JSON of the generate extension: an object for each response, a value for each output."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response

from app.api.error_table import headers_of
from app.api.oip.errors import is_of_model, message_of, status_of
from app.api.oip.infer_answer import data_of
from app.api.oip.infer_request import Asked
from app.api.responses import JsonResponse
from app.domain.errors import GatewayError
from app.domain.inference import InferenceResponse
from app.domain.tensor import BYTES, Tensor

Values = dict[str, Any]

EVENTS = "text/event-stream; charset=utf-8"


class Ending(NamedTuple):
    """The end of a stream, for ``app.streams``. This dialect has no early exits."""

    outputs: Sequence[Values]
    early_exit: None = None


class Generated:
    """The values of each response of one request. A character that is split between responses stays whole."""

    has_enough = False

    def __init__(self, asked: Asked) -> None:
        own_id = {"id": asked.id} if asked.id else {}
        self._frame: Values = own_id | {"model_name": asked.inference.model, "model_version": ""}
        self._texts: dict[str, codecs.IncrementalDecoder] = {}

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the values of a response; None for a response without outputs."""
        if not response.outputs:
            return None
        self._frame["model_version"] = response.version
        return {name: self._value_of(tensor) for name, tensor in response.outputs.items()} | self._frame

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Returns a last output if bytes of an incomplete character remain. Raises ``error``."""
        if error is not None:
            raise error
        rests = {name: rest for name, text in self._texts.items() if (rest := text.decode(b"", final=True))}
        return Ending([rests | self._frame] if rests else [])

    def _value_of(self, tensor: Tensor) -> Any:
        if tensor.array.size != 1:
            return data_of(tensor)
        if tensor.datatype == BYTES:
            return self._text_of(tensor.name).decode(tensor.array.item())
        return data_of(tensor).item()

    def _text_of(self, output: str) -> codecs.IncrementalDecoder:
        known = self._texts.get(output)
        if known is None:
            known = self._texts[output] = codecs.getincrementaldecoder("utf-8")("replace")
        return known


def values_of(asked: Asked, response: InferenceResponse) -> Values:
    """Returns the values of the only response."""
    generated = Generated(asked)
    values = generated.add(response) or {}
    for rests in generated.finish().outputs:
        values |= {name: values[name] + rest for name, rest in rests.items() if name in response.outputs}
    return values


def error_response(error: GatewayError, _request_id: str) -> Response:
    return JsonResponse(error_object(error), _status_of(error), headers_of(error))


def stream_error_response(error: GatewayError, _request_id: str) -> Response:
    """Answers an error of the model with an event, as Triton does, and every other error with JSON."""
    if not is_of_model(error):
        return error_response(error, _request_id)
    return Response(b"data: %b\n\n" % orjson.dumps(error_object(error)), _status_of(error), media_type=EVENTS)


def error_object(error: GatewayError, _request_id: str = "") -> Values:
    return {"error": message_of(error)}


def _status_of(error: GatewayError) -> int:
    """Triton 2.51 answers 400 for every error of a model, because a stream does not transport the error's code."""
    return 400 if is_of_model(error) else status_of(error)
