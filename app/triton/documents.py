"""Converts Triton's protobuf messages to the JSON of its HTTP endpoint.

The JSON converter of protobuf is not suitable: it writes 64-bit integers as strings and omits default values.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2

from app.domain.engine import Document


def document_request(document: Document, model: str, version: str) -> Any:
    if document == "metadata":
        return service_pb2.ModelMetadataRequest(name=model, version=version)
    if document == "config":
        return service_pb2.ModelConfigRequest(name=model, version=version)
    return service_pb2.ModelStatisticsRequest(name=model, version=version)


def document_of(reply: Any) -> dict[str, Any]:
    """Converts ``reply``, the response to :func:`document_request`."""
    return _object_of(reply.config if isinstance(reply, service_pb2.ModelConfigResponse) else reply)


def _object_of(message: Message) -> dict[str, Any]:
    return {
        field.name: _value_of(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value_of(value: Any, field: Any) -> Any:
    """``field``: the descriptor of the value's field."""
    if isinstance(value, Mapping):
        of_value = field.message_type.fields_by_name["value"]
        return {str(key): _plain(value[key], of_value) for key in value}
    if field.is_repeated:
        return [_plain(each, field) for each in value]
    return _plain(value, field)


def _plain(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _object_of(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
