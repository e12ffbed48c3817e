"""What each dialect must answer to a request, derived from Triton's responses with none of the gateway's code."""

import base64
import json
from typing import Any

import numpy as np

from tests.zoo.cases import Case, Tensor, Tensors, Truth
from tests.zoo.kinds import Kind

EARLY_EXIT = "nothing"
"""The reason that the table declares for a missing output."""


def values_of(tensor: Tensor) -> list[Any]:
    """The flat JSON values of a tensor: NaN and infinity are null, bytes that are not UTF-8 are U+FFFD."""
    array = wide(tensor).reshape(-1)
    if tensor.datatype != "BYTES" and np.isfinite(array).all():
        return array.tolist()
    return [_value(tensor.datatype, "text", element) for element in array.tolist()]


def wide(tensor: Tensor) -> np.ndarray[Any, Any]:
    """BF16 as FP32."""
    if tensor.datatype != "BF16":
        return tensor.array
    return (tensor.array.astype(np.uint32) << 16).view(np.float32)


def nested(tensor: Tensor, kind: str, *, has_batch: bool, keeps_batch: bool, is_single: bool) -> Any:
    """The JSON value of a field of a pipeline."""
    array = wide(tensor)
    if has_batch and not keeps_batch:
        array = array[0]
    if is_single:
        array = array.reshape(array.shape[0]) if keeps_batch else array.reshape(())
    if tensor.datatype != "BYTES":
        return array.tolist() if np.isfinite(array).all() else _without_nan(array)
    converted = np.empty(array.shape, np.object_)
    for index in np.ndindex(array.shape):
        converted[index] = _value("BYTES", kind, array[index])
    return converted.tolist()


def event_of(kind: Kind, response: Tensors, *, batch: bool) -> dict[str, Any]:
    """One response as the outputs of a pipeline. A text that may be split over responses is left as bytes."""
    event = {}
    for name in kind.output_forms:
        bare = kind.is_single(name) and not batch
        tensor = response.get(name)
        if tensor is None or not tensor.array.size:
            event[name] = b"" if is_run_of_text(kind, name, batch=batch) else None if bare else []
        elif is_run_of_text(kind, name, batch=batch):
            event[name] = tensor.array.item()
        else:
            event[name] = nested(
                tensor, kind.kind_of(name), has_batch=kind.batch > 0, keeps_batch=batch, is_single=kind.is_single(name)
            )
    return event


def is_run_of_text(kind: Kind, name: str, *, batch: bool) -> bool:
    return kind.is_decoupled and kind.is_single(name) and kind.kind_of(name) == "text" and not batch


def joined(kind: Kind, truth: Truth, *, batch: bool) -> dict[str, Any]:
    """The unary answer: a text is concatenated, lists are joined."""
    events = [event_of(kind, response, batch=batch) for response in truth.responses]
    if not kind.is_decoupled:
        return events[0]
    whole: dict[str, Any] = {}
    for name in kind.output_forms:
        parts = [event[name] for event in events]
        if is_run_of_text(kind, name, batch=batch):
            whole[name] = b"".join(parts).decode("utf-8", "replace")
        elif kind.is_single(name) and not batch:
            whole[name] = [part for part in parts if part is not None]
        else:
            whole[name] = [item for part in parts for item in part]
    return whole


def body_of(case: Case, *, batch: bool) -> dict[str, Any]:
    """The JSON body for the pipeline of a kind."""
    return {
        name: nested(
            tensor,
            case.kind.kind_of(name),
            has_batch=case.kind.batch > 0,
            keeps_batch=batch,
            is_single=case.kind.is_single(name),
        )
        for name, tensor in case.inputs.items()
    }


def is_json(case: Case) -> bool:
    """Whether JSON can express the inputs under `/v2`: texts must be UTF-8."""
    return not any(form.is_raw for form in case.kind.input_forms.values())


def _value(datatype: str, kind: str, element: Any) -> Any:
    if datatype != "BYTES":
        return None if isinstance(element, float) and not np.isfinite(element) else element
    if kind == "text":
        return element.decode("utf-8", "replace")
    return json.loads(element) if kind == "json" else base64.b64encode(element).decode()


def _without_nan(array: np.ndarray[Any, Any]) -> Any:
    if array.ndim == 0:
        return None
    return (
        [_without_nan(part) for part in array]
        if array.ndim > 1
        else [_value("FP32", "", each) for each in array.tolist()]
    )
