"""The schemas of the protocol, shared by all models, and the request schemas of one model."""

import re

import numpy as np

from app.api.oip.infer_request import MAX_ID
from app.api.oip.parameters import MAX_NAME, MAX_PARAMETERS, MAX_TEXT
from app.domain.json_schema import Schema, const_of, enum_of, one_of
from app.domain.model import ModelConfig, TensorSpec
from app.domain.tensor import BYTES, DTYPE_BY_DATATYPE, INTEGER_DATATYPES

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SHAPE: Schema = {"type": "array", "items": {"type": "integer", "minimum": -1}}
_VALUE: Schema = {"type": ["boolean", "number", "string", "null"]}
_PARAMETERS: Schema = {
    "propertyNames": {
        "pattern": "^(?!(triton_|sequence_|shared_memory_)|(priority|timeout|headers|binary_data|binary_data_output|"
        f"classification|traceparent)$)[ -~]{{1,{MAX_NAME}}}$"
    },
    "additionalProperties": {
        "type": ["boolean", "number", "string"],
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
        "maxLength": MAX_TEXT,
        "pattern": "^[^\\u0000]*$",
    },
    "maxProperties": MAX_PARAMETERS,
}
_LARGEST: dict[str, float] = {"FP16": 65504.0, "BF16": 3.3895313892515355e38, "FP32": 3.4028234663852886e38}


def _object(properties: Schema, *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


_METADATA_TENSOR = _object({"name": _TEXT, "datatype": _TEXT, "shape": _SHAPE})
_OUTPUT = _object(
    {
        "name": _TEXT,
        "datatype": enum_of(DTYPE_BY_DATATYPE),
        "shape": _list(_COUNT),
        "data": _list(_VALUE),
        "parameters": _object({"binary_data_size": _COUNT}),
    },
    "data",
    "parameters",
)

SCHEMAS: Schema = {
    "OipError": _object({"error": _TEXT}),
    "OipServer": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "OipIndex": _list(
        _object({"name": _TEXT, "version": _TEXT, "state": enum_of(["READY", "UNAVAILABLE"])}),
    ),
    "OipModel": _object(
        {
            "name": _TEXT,
            "versions": _list(_TEXT),
            "platform": _TEXT,
            "inputs": _list(_METADATA_TENSOR),
            "outputs": _list(_METADATA_TENSOR),
        }
    ),
    "OipConfig": _object({"name": _TEXT, "max_batch_size": _COUNT, "input": _list({}), "output": _list({})}),
    "OipStatistics": _object({"model_stats": _list(_object({"name": _TEXT, "version": _TEXT}))}),
    "OipInferResult": _object(
        {"id": _TEXT, "model_name": _TEXT, "model_version": _TEXT, "outputs": _list(_OUTPUT)}, "id"
    ),
}


def infer_request(config: ModelConfig) -> Schema:
    """OpenAPI cannot describe the binary tensors after the JSON."""
    inputs = [_input(spec, config.max_batch_size) for spec in config.inputs]
    outputs = _object({"name": enum_of(spec.name for spec in config.outputs)})
    listed: Schema = {"type": "array", "items": one_of(inputs) if inputs else {}}
    required = [spec for spec in config.inputs if not spec.optional]
    listed |= {"minItems": len(required), "maxItems": len(inputs)}
    if required:
        listed["allOf"] = [{"contains": _object({"name": const_of(spec.name)})} for spec in required]
    return _object({"id": {**_TEXT, "maxLength": MAX_ID}, "inputs": listed, "outputs": _list(outputs)}, "id", "outputs")


def _input(spec: TensorSpec, max_batch_size: int) -> Schema:
    batch = [{"type": "integer", "minimum": 1, "maximum": max_batch_size}] if max_batch_size else []
    dims = [*batch, *map(_dimension, spec.dims)]
    shape = {**_list({"type": "integer"}), "prefixItems": dims, "minItems": len(dims), "maxItems": len(dims)}
    data = _list(_element(spec.datatype))
    return _object({"name": const_of(spec.name), "datatype": const_of(spec.datatype), "shape": shape, "data": data})


def _dimension(dim: int) -> Schema:
    return {**_COUNT, "maximum": 2**63 - 1} if dim == -1 else const_of(dim)


def _element(datatype: str) -> Schema:
    if datatype in INTEGER_DATATYPES:
        limits = np.iinfo(DTYPE_BY_DATATYPE[datatype])
        return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    if datatype in {BYTES, "BOOL"}:
        return {"type": "string" if datatype == BYTES else "boolean"}
    largest = _LARGEST.get(datatype)
    return {"type": "number"} | ({} if largest is None else {"minimum": -largest, "maximum": largest})


def generate_request(config: ModelConfig) -> Schema:
    """Members that are not inputs are request parameters.

    Not ``additionalProperties``: orval makes an index signature of it, which the inputs do not fit.
    """
    fields = {spec.name: _one_or_list(_element(spec.datatype)) for spec in config.inputs}
    optional = [spec.name for spec in config.inputs if spec.optional]
    members = {**fields, "id": {**_TEXT, "maxLength": MAX_ID}, "parameters": {"type": "object", **_PARAMETERS}}
    schema = _object(members, *optional, "id", "parameters") | _PARAMETERS
    named = "|".join(re.sub(r"[\\^$.*+?()\[\]{}|]", r"\\\g<0>", name) for name in members)
    return schema | {"patternProperties": {f"^(?!({named})$)": schema.pop("additionalProperties")}}


def generate_result(config: ModelConfig) -> Schema:
    fields = {spec.name: {"anyOf": [_VALUE, _list(_VALUE)]} for spec in config.outputs}
    named = {"id": _TEXT, "model_name": _TEXT, "model_version": _TEXT}
    return _object({**fields, **named}, *fields, "id")


def _one_or_list(element: Schema) -> Schema:
    return {"anyOf": [element, _list(element)]}
