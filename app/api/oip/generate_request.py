"""Converts the body of a generate request to an InferenceRequest.

Source: Triton's generate extension. Each member is an input of the model, by its name, or a request parameter. Members
of ``parameters`` are treated like members of the object.
"""

import math
from collections.abc import Iterable, Iterator

import msgspec

from app.api.oip.infer_request import MAX_ID, Asked
from app.api.oip.parameters import checked, parameter_of
from app.api.oip.signature import Input, Signature
from app.domain.errors import InvalidInput, InvalidRequest
from app.domain.inference import InferenceRequest, Parameter
from app.domain.printable import shown
from app.domain.tensor import Tensor
from app.pipelines.body import LARGE_BYTES
from app.pipelines.structure import WHITESPACE, members_of

_Member = tuple[str, memoryview]
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_id = msgspec.json.Decoder(str)
_MAX_BLANK = 1024
"""Limit of the white space before a list, in bytes."""


def generation_of(body: memoryview, signature: Signature, version: str) -> Asked:
    """Raises InvalidJson, InvalidRequest or InvalidInput."""
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Parameter] = {}
    own_id = ""
    for name, text in _members_of(body):
        if name in signature.inputs:
            if name in tensors:
                raise InvalidInput(f"input '{name}' already exists in request")
            tensors[name] = _tensor_of(signature.inputs[name], text)
        elif name == "id":
            own_id = _id_of(text)
        elif name in parameters:
            raise InvalidInput(f"parameter '{shown(name)}' is given twice.")
        else:
            parameters[name] = parameter_of(name, text)
    given = tuple(tensors.values())
    signature.check_inputs(given)
    inference = InferenceRequest(
        model=signature.config.name,
        version=version,
        inputs=given,
        parameters=checked(parameters, signature.rules.sequence_ids),
        takes_traceparent=signature.rules.takes_traceparent,
    )
    return Asked(inference, own_id)


def _members_of(body: memoryview) -> Iterable[_Member]:
    """Returns the members of the object and of ``parameters``, with duplicates. Raises the errors of ``members_of``."""
    members = _decoded_at_once(bytes(body)) if len(body) < LARGE_BYTES else None
    return _read_by_member(body) if members is None else members


def _decoded_at_once(body: bytes) -> list[_Member] | None:
    """Returns None if the body is invalid or may have duplicate names; the decoder would keep only the last."""
    try:
        outer = _decode_members(body)
        inner = _decode_members(outer["parameters"]) if "parameters" in outer else {}
    except (ValueError, RecursionError):
        return None
    members = [*outer.items(), *inner.items()]
    is_clear = body.count(b":") == len(members)
    if not is_clear and (b"\\u" in body or any(body.count(f'"{name}"'.encode()) > 1 for name, _ in members)):
        return None
    return [(name, memoryview(text)) for name, text in members if text is not outer.get("parameters")]


def _read_by_member(body: memoryview) -> Iterator[_Member]:
    for name, text in members_of(body):
        if name == "parameters":
            yield from _nested(text)
        else:
            yield name, text


def _nested(text: memoryview) -> Iterator[_Member]:
    try:
        yield from members_of(text)
    except InvalidRequest as exc:
        raise InvalidInput("Expected JSON object for keyword: 'parameters'.") from exc


def _tensor_of(known: Input, text: memoryview) -> Tensor:
    """``text``: one element, or a flat list of them. Raises InvalidInput or InvalidJson."""
    if not bytes(text[:_MAX_BLANK]).lstrip(WHITESPACE).startswith(b"["):
        text = memoryview(b"".join((b"[", text, b"]")))
    tensor = known.of_list(text)
    shape = _shape_of(tensor.array.size, known)
    known.check_shape(shape)
    return Tensor(tensor.name, tensor.datatype, tensor.array.reshape(shape))


def _shape_of(size: int, known: Input) -> tuple[int, ...]:
    """The last free dimension gets the remaining elements, other free dimensions are 1. Raises InvalidInput."""
    dims = list(known.dims)
    last = max((index for index, dim in enumerate(dims) if dim == -1), default=None)
    shape = [1 if dim == -1 else dim for dim in dims]
    others = math.prod(shape)
    if last is not None and others:
        shape[last] = size // others
    if math.prod(shape) != size:
        raise InvalidInput(f"The schema can not convert input '{known.spec.name}' to tensor with proper shape.")
    return tuple(shape)


def _id_of(text: memoryview) -> str:
    try:
        own_id: str = _id.decode(text)
    except ValueError as exc:
        raise InvalidInput("Unable to parse 'id': attempt to access JSON non-string as string") from exc
    if len(own_id) > MAX_ID:
        raise InvalidInput(f"'id' must have at most {MAX_ID} characters.")
    return own_id
