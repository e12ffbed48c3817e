"""The types with which msgspec decodes, checks and describes the JSON of a field."""

import functools
import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from app.domain.model import TensorSpec
from app.domain.tensor import DTYPE_BY_DATATYPE, INTEGER_DATATYPES
from app.pipelines.spec import InputSpec, ParameterSpec

_INT64 = np.iinfo(np.int64)


def input_type(spec: InputSpec, tensor: TensorSpec, *, depth: int) -> Any:
    """``depth``: nested lists around an element; a single value may be a list of one element. Raises ValueError."""
    if spec.kind == "json":
        return msgspec.Raw
    element = element_type(spec, tensor)
    if depth == 0:
        return element | Annotated[_list_of(element), Meta(min_length=1, max_length=1)]
    return functools.reduce(lambda inner, _: _list_of(inner), range(depth), element)


def parameter_type(spec: ParameterSpec, tensor: TensorSpec | None) -> Any:
    """``tensor``: the input for the parameter, if it is a tensor. Raises ValueError."""
    if spec.type == "integer":
        limits = _INT64 if tensor is None else np.iinfo(DTYPE_BY_DATATYPE[tensor.datatype])
        return _integer_type(spec, int(limits.min), int(limits.max))
    if spec.type == "number":
        return _float_type(spec)
    return Literal[tuple(spec.enum)] if spec.enum else bool if spec.type == "boolean" else str


def _list_of(element: Any) -> Any:
    return list[element]


def element_type(spec: InputSpec, tensor: TensorSpec) -> Any:
    """Returns the type of one element, without the lists around it. Raises ValueError."""
    if spec.kind == "number":
        return _number_type(spec, tensor.datatype)
    if spec.kind == "text":
        return Literal[tuple(spec.enum)] if spec.enum else str
    schema = {"contentEncoding": "base64", "contentMediaType": "image/*" if spec.kind == "image" else "*/*"}
    return Annotated[str, Meta(extra_json_schema=schema)]


def _number_type(spec: InputSpec, datatype: str) -> Any:
    if datatype == "BOOL":
        return bool
    if datatype not in INTEGER_DATATYPES:
        return _float_type(spec)
    limits = np.iinfo(DTYPE_BY_DATATYPE[datatype])
    return _integer_type(spec, int(limits.min), int(limits.max))


def _integer_type(spec: InputSpec | ParameterSpec, low: int, high: int) -> Any:
    """``low`` and ``high``: the datatype's bounds. msgspec supports INT64 bounds; numpy checks those of UINT64."""
    if spec.enum:
        if not all(type(value) is int and low <= value <= min(high, _INT64.max) for value in spec.enum):
            raise ValueError("has an enum whose values are not all integers within the datatype")
        return Literal[tuple(spec.enum)]
    low = low if spec.minimum is None else max(low, math.ceil(spec.minimum))
    high = high if spec.maximum is None else min(high, math.floor(spec.maximum))
    if low > high or low > _INT64.max or (spec.maximum is not None and high > _INT64.max):
        raise ValueError("has bounds that no value of its datatype can meet, or beyond 2**63-1")
    return Annotated[int, Meta(ge=low, le=high if high <= _INT64.max else None)]


def _float_type(spec: InputSpec | ParameterSpec) -> Any:
    schema = {"enum": spec.enum} if spec.enum else None
    if spec.minimum is None and spec.maximum is None and schema is None:
        return float
    return Annotated[float, Meta(ge=spec.minimum, le=spec.maximum, extra_json_schema=schema)]
