"""Renders a model's response as JSON, followed by binary tensors if the caller requests them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from app.api.exchange import Exchange, Header
from app.api.oip.infer_request import Asked
from app.api.responses import JSON, send_parts
from app.domain.inference import InferenceResponse
from app.domain.json_text import NUMBERS_AT_ONCE, joined_in_turns, json_of, slices_of
from app.domain.tensor import BYTES, Tensor

Buffer = bytes | memoryview
Described = dict[str, Any]

_BINARY: Header = (b"content-type", b"application/octet-stream")
_LARGE_BYTES = 64 * 1024
"""Answers below this size are sent in one piece."""


async def send_answer(exchange: Exchange, asked: Asked, response: InferenceResponse) -> None:
    raws: list[Buffer] = []
    outputs = [_described(tensor, asked, raws) for tensor in response.outputs.values()]
    frame = _frame_of(asked, response)
    head = await joined_in_turns(_pieces_of(frame, outputs)) if _is_large(outputs) else [_small(frame, outputs)]
    headers = _headers_of(sum(map(len, head)), raws)
    size = sum(map(len, head)) + sum(map(len, raws))
    if size < _LARGE_BYTES:
        await exchange.answer(((b"content-length", b"%d" % size), *headers), b"".join((*head, *raws)))
    else:
        await send_parts(exchange, [*head, *raws], headers)


def data_of(tensor: Tensor) -> Any:
    """Returns the elements as a flat list for JSON; NaN and infinity become null, invalid UTF-8 becomes U+FFFD."""
    if tensor.datatype == BYTES:
        return [str(element, "utf-8", "replace") for element in tensor.array.flat]
    flat = np.ascontiguousarray(tensor.array).reshape(-1)
    return flat.astype(np.float32) if tensor.datatype == "BF16" else flat


def _headers_of(json_bytes: int, raws: list[Buffer]) -> tuple[Header, ...]:
    if not any(map(len, raws)):
        return (JSON,)
    return _BINARY, (b"inference-header-content-length", b"%d" % json_bytes)


def _described(tensor: Tensor, asked: Asked, raws: list[Buffer]) -> Described:
    """``raws``: the bytes of binary tensors are added to it."""
    described: Described = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
    if asked.is_binary(tensor.name):
        raw = _raw_of(tensor)
        raws.append(raw)
        return described | {"parameters": {"binary_data_size": len(raw)}}
    return described | {"data": data_of(tensor)}


def _raw_of(tensor: Tensor) -> Buffer:
    if tensor.datatype == BYTES:
        return b"".join([part for each in tensor.array.flat for part in (len(each).to_bytes(4, "little"), each)])
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data


def _frame_of(asked: Asked, response: InferenceResponse) -> Described:
    own_id = {"id": asked.id} if asked.id else {}
    return own_id | {"model_name": asked.inference.model, "model_version": response.version}


def _is_large(outputs: list[Described]) -> bool:
    return any(len(output.get("data", ())) > NUMBERS_AT_ONCE for output in outputs)


def _small(frame: Described, outputs: list[Described]) -> bytes:
    return json_of(frame | {"outputs": outputs})


def _pieces_of(frame: Described, outputs: list[Described]) -> Iterator[bytes | memoryview]:
    yield json_of(frame)[:-1] + b',"outputs":['
    before = b""
    for output in outputs:
        data = output.pop("data", None)
        yield before + json_of(output)[:-1]
        if isinstance(data, np.ndarray):
            yield b',"data":'
            yield from slices_of(data)
        elif data is not None:
            yield b',"data":' + json_of(data)
        yield b"}"
        before = b","
    yield b"]}"
