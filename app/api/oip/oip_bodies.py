"""Converts the bodies of infer and generate requests to a ParsedRequest, and the model's responses to answers.

Infer: JSON with optional binary tensors after it; in the answer they follow the JSON if the caller requests them.
Generate: an object whose members are inputs of the model, by their names, or request parameters; an answer is an object
for each response, with a value for each output. Source: Open Inference Protocol, "Inference"; Triton's binary tensor
data, classification and generate extensions.
"""

import codecs
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app.api.exchange import JSON, Exchange
from app.api.oip.signature import Input, Signature, not_json, parameter_of
from app.codecs.json_scan import WHITESPACE, members_of, spans_of
from app.core import inference
from app.core.answer import Answer, Ending, Values
from app.core.errors import GatewayError, InvalidInput, InvalidJson, InvalidRequest
from app.core.json import is_large, json_in_turns, json_of
from app.core.model import ModelConfig
from app.core.text import shown
from app.pipelines.body import LARGE_BYTES

MAX_ID = 1024
_CLASSIFIED = inference.INTEGER_DATATYPES | (inference.FLOAT_DATATYPES - {"FP16", "BF16"})
"""The datatypes for which Triton 2.51 supports classification."""

_ONE_FIELD = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'."
)

_Size = Annotated[int, Meta(ge=0)]


class _TensorParameters(Struct):
    """An input has ``binary_data_size``; an output has ``binary_data`` and ``classification``."""

    binary_data_size: _Size | UnsetType = UNSET
    binary_data: bool = False
    classification: _Size = 0
    shared_memory_region: str | UnsetType = UNSET


class _Output(Struct, kw_only=True):
    name: str
    parameters: _TensorParameters | None = None


class _Input(_Output, kw_only=True):
    datatype: str
    shape: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]]
    data: Raw | UnsetType = UNSET


class _Body(Struct):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    parameters: dict[str, Raw] | None = None
    id: Annotated[str, Meta(max_length=MAX_ID)] | None = None


_NO_PARAMETERS = _TensorParameters()
_decode = msgspec.json.Decoder(_Body).decode
_MAX_BLANK = 1024
"""Limit of the white space before a list in a generate request, in bytes."""
_DEPTH_OF_INPUTS = 3
"""The objects of the inputs are in a list, in the object of the body."""


class ParsedRequest(Struct, frozen=True, eq=False):
    """A parsed request: the call of the model, and the format of the answer."""

    request: inference.InferenceRequest
    id: str = ""
    listed: Mapping[str, bool] = {}
    """The outputs for the caller, and whether as binary data."""


def parse_request(body: memoryview, json_bytes: int, signature: Signature, version: str) -> ParsedRequest:
    """``json_bytes``: length of the JSON, before the binary tensors. Raises InvalidJson or InvalidInput."""
    decoded = _decoded(body[:json_bytes])
    given = decoded.parameters or {}
    parameters = {name: parameter_of(name, memoryview(value)) for name, value in given.items()}
    all_binary = parameters.pop("binary_data_output", False)
    if not isinstance(all_binary, bool):
        raise InvalidInput("Unable to parse 'binary_data_output': attempt to access JSON non-boolean as boolean")
    tensors = list(_tensors_of(decoded.inputs, body[json_bytes:], signature))
    sent, listed = dict[str, inference.RequestedOutput](), dict[str, bool]()
    if decoded.outputs and signature.config.is_ensemble:
        # Triton 2.51 fails if it is asked for only some outputs of an ensemble ("unexpected deadlock").
        sent = {name: inference.RequestedOutput(name) for name in signature.outputs}
    for each in decoded.outputs or ():
        if (known := signature.outputs.get(each.name)) is None:
            raise signature.unexpected("output", each.name)
        if each.name in listed:  # as Triton 2.69
            raise InvalidInput(f"output '{each.name}' already exists in request")
        wanted = each.parameters or _NO_PARAMETERS
        _check_region(wanted)
        if wanted.classification:  # Triton 2.51 crashes for BYTES and for empty outputs
            refusal = f"class result not available for output '{known.name}'"
            if known.datatype not in _CLASSIFIED or wanted.classification > 2**31 - 1:
                raise InvalidInput(f"{refusal} of datatype {known.datatype}.")
            if any(dim < 1 for dim in known.dims):
                raise InvalidInput(f"{refusal}, which may have no element.")
        sent[known.name] = inference.RequestedOutput(known.name, wanted.classification)
        listed[known.name] = wanted.binary_data
    request = signature.request_of(tensors, version, parameters, sent.values())
    return ParsedRequest(request, decoded.id or "", listed or dict.fromkeys(signature.outputs, all_binary))


def parse_raw_request(body: memoryview, signature: Signature, version: str) -> ParsedRequest:
    """Converts a body of raw bytes for the model's only input, which may have at most one free dimension.

    For BYTES, the body is the only element, without its length.
    """
    if len(signature.inputs) != 1:
        raise InvalidInput(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(signature.inputs)} inputs in "
            f"'{signature.config.name}' model configuration"
        )
    (only,) = signature.inputs.values()
    shape = (1, *only.spec.dims) if only.max_batch_size else only.spec.dims
    if not only.itemsize:
        if any(dim != 1 for dim in shape):
            raise InvalidInput(
                f"For BYTE datatype raw input '{only.spec.name}', the model must have input shape [1]. Send the "
                "elements as a binary tensor, each with its length."
            )
        tensor = only.of_elements([body], shape)
    else:
        known = math.prod(dim for dim in shape if dim != -1)
        if shape.count(-1) > 1 or (-1 in shape and not known):
            raise InvalidInput("A raw request is accepted only if the model leaves at most one dimension open.")
        free = len(body) // (known * only.itemsize) if -1 in shape else 0
        tensor = only.of_bytes(body, tuple(free if dim == -1 else dim for dim in shape))
    return ParsedRequest(signature.request_of([tensor], version, {}), listed=dict.fromkeys(signature.outputs, True))


def _decoded(text: memoryview) -> _Body:
    """Data may have NaN and infinity as literals, which only floats accept: the inputs decode them."""
    try:
        try:
            return _decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            spans = spans_of(text, "data", _DEPTH_OF_INPUTS)
        mark = inference.new_request_id().encode()
        start, rest, found = 0, list[bytes | memoryview](), dict[bytes, memoryview]()
        for begin, end in spans:
            name = b'"%b %d"' % (mark, begin)
            rest += text[start:begin], name
            found[name], start = text[begin:end], end
        body = _decode(b"".join((*rest, text[start:])))
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"The request does not follow the protocol: {exc}.") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidJson) as exc:
        raise not_json() from exc
    for each in body.inputs:
        if isinstance(each.data, Raw):
            each.data = Raw(found.get(bytes(each.data), memoryview(each.data)))
    return body


def _tensors_of(given: Sequence[_Input], binary: memoryview, signature: Signature) -> Iterator[inference.Tensor]:
    start = 0
    for each in given:
        if (known := signature.inputs.get(each.name)) is None:
            raise signature.unexpected("input", each.name)
        if each.datatype != known.spec.datatype:
            if each.datatype not in inference.DTYPE_BY_DATATYPE:
                raise InvalidInput(f"invalid datatype for input {known.spec.name}")
            expected = f"model '{known.model}' expects '{known.spec.datatype}'"
            raise InvalidInput(f"inference input '{known.spec.name}' data-type is '{each.datatype}', but {expected}")
        parameters = each.parameters or _NO_PARAMETERS
        shape, size = tuple(each.shape), parameters.binary_data_size
        known.check_shape(shape)
        _check_region(parameters)
        if (each.data is UNSET) == (size is UNSET):
            found = "no field is set" if size is UNSET else "set 'data' 'binary_data_size'"
            raise InvalidInput(f"{_ONE_FIELD} But {found} for input '{known.spec.name}'")
        if isinstance(each.data, Raw):
            yield known.of_json(memoryview(each.data), shape)
        elif isinstance(size, int):
            start += size
            if start > len(binary):
                missing = f"expecting {start - len(binary)} additional bytes for model '{known.model}'"
                raise InvalidInput(f"unexpected size for input '{known.spec.name}', {missing}")
            yield known.of_bytes(binary[start - size : start], shape)
    if start != len(binary):
        raise InvalidInput(f"unexpected additional input data for model '{signature.config.name}'")


def _check_region(parameters: _TensorParameters) -> None:
    """Raises InvalidInput."""
    if isinstance(name := parameters.shared_memory_region, str):
        text = f"Unable to find shared memory region: '{shown(name)}'. This gateway accepts none from callers."
        raise InvalidInput(text)


async def send_answer(exchange: Exchange, parsed: ParsedRequest, response: inference.InferenceResponse) -> None:
    """Sends the response as JSON, followed by binary tensors if the caller requests them."""
    outputs, raws = list[dict[str, Any]](), list[inference.Buffer]()
    for tensor in response.outputs.values():
        if (is_binary := parsed.listed.get(tensor.name)) is None:
            continue
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if is_binary:
            parts = inference.raw_parts(tensor)
            raws.append(parts[0] if len(parts) == 1 else b"".join(parts))
            described["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            described["data"] = data_of(tensor)
        outputs.append(described)
    own_id = {"id": parsed.id} if parsed.id else {}
    frame: Values = own_id | {"model_name": parsed.request.model, "model_version": response.version}
    if response.early_exit is not None:
        frame["parameters"] = {"early_exit": response.early_exit}
    head: list[bytes | bytearray] = []
    if any(map(is_large, outputs)):
        head.append(json_of(frame)[:-1])
        for output in outputs:
            head += [b"," if len(head) > 1 else b',"outputs":[', *await json_in_turns(output)]
        head.append(b"]}")
    else:
        head.append(json_of(frame | {"outputs": outputs}))
    json_bytes, raw_bytes = sum(map(len, head)), sum(map(len, raws))
    headers = [JSON]
    if raw_bytes:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % json_bytes),
        ]
    if json_bytes + raw_bytes < LARGE_BYTES:
        await exchange.answer(b"".join((*head, *raws)), *headers)
    else:
        await exchange.send_parts([*head, *raws], headers)


def exited(
    config: ModelConfig, reason: str, responses: Sequence[inference.InferenceResponse]
) -> inference.InferenceResponse:
    """The response of a request that the gateway ended early. Outputs that no response has are empty."""
    typed = [spec for spec in config.outputs if spec.is_typed]
    outputs = {spec.name: inference.Tensor.empty(spec.name, spec.datatype, spec.dims[1:]) for spec in typed}
    for each in responses:
        outputs |= each.outputs
    return inference.InferenceResponse(outputs, version=responses[0].version if responses else "", early_exit=reason)


def data_of(tensor: inference.Tensor) -> Any:
    """Returns the elements as a flat list for JSON; NaN and infinity become null, invalid UTF-8 becomes U+FFFD."""
    if tensor.datatype == inference.BYTES:
        return [str(element, "utf-8", "replace") for element in tensor.array.flat]
    flat = np.ascontiguousarray(tensor.array).reshape(-1)
    return flat.astype(np.float32) if tensor.datatype == "BF16" else flat


def generation_of(body: memoryview, signature: Signature, version: str) -> ParsedRequest:
    """Converts the body of a generate request. Members of ``parameters`` are treated like members of the object.

    Raises InvalidJson, InvalidRequest or InvalidInput.
    """
    tensors: dict[str, inference.Tensor] = {}
    parameters: dict[str, inference.Parameter] = {}
    for name, text in _members_of(body):
        if name in signature.inputs:
            if name in tensors:
                raise InvalidInput(f"input '{name}' already exists in request")
            tensors[name] = _tensor_of(signature.inputs[name], text)
        elif name in parameters:
            raise InvalidInput(f"parameter '{shown(name)}' is given twice.")
        else:
            parameters[name] = parameter_of(name, text)
    own_id = parameters.pop("id", "")
    if not isinstance(own_id, str) or len(own_id) > MAX_ID:
        raise InvalidInput(f"'id' must be a text of at most {MAX_ID} characters.")
    return ParsedRequest(signature.request_of([*tensors.values()], version, parameters), own_id)


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


def _tensor_of(known: Input, text: memoryview) -> inference.Tensor:
    """``text``: one element, or a flat list of them. The last free dimension gets them; other free ones are 1.

    Raises InvalidInput or InvalidJson.
    """
    if not bytes(text[:_MAX_BLANK]).lstrip(WHITESPACE).startswith(b"["):
        text = memoryview(b"".join((b"[", text, b"]")))
    tensor = known.of_json(text)
    size, shape = tensor.array.size, [1 if dim == -1 else dim for dim in known.dims]
    if -1 in known.dims and (others := math.prod(shape)):
        shape[len(shape) - 1 - known.dims[::-1].index(-1)] = size // others
    if math.prod(shape) != size:
        raise InvalidInput(f"The schema can not convert input '{known.spec.name}' to tensor with proper shape.")
    known.check_shape(tuple(shape))
    return inference.Tensor(tensor.name, tensor.datatype, tensor.array.reshape(shape))


class Generated(Answer):
    """The answer of a stream: the values of each response.

    A character that is split between responses stays whole.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        own_id = {"id": parsed.id} if parsed.id else {}
        self._frame: Values = own_id | {"model_name": parsed.request.model, "model_version": ""}
        self._texts: dict[str, codecs.IncrementalDecoder] = {}

    def add(self, response: inference.InferenceResponse) -> Values | None:
        """Returns the values of a response; None for a response without outputs and without an early exit."""
        if response.early_exit is not None:
            self._frame["early_exit"] = response.early_exit
        elif not response.outputs:
            return None
        self._frame["model_version"] = response.version
        return {name: self._value_of(tensor) for name, tensor in response.outputs.items()} | self._frame

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Returns a last output if bytes of an incomplete character remain. Raises ``error``."""
        super().finish(error)
        rests = {name: rest for name, text in self._texts.items() if (rest := text.decode(b"", final=True))}
        return Ending(self._frame.get("early_exit"), [rests | self._frame] if rests else ())

    def _value_of(self, tensor: inference.Tensor) -> Any:
        if tensor.array.size != 1:
            return data_of(tensor)
        if tensor.datatype == inference.BYTES:
            if tensor.name not in self._texts:
                self._texts[tensor.name] = codecs.getincrementaldecoder("utf-8")("replace")
            return self._texts[tensor.name].decode(tensor.array.item())
        return data_of(tensor).item()
