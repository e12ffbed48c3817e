"""Converts a request's body of any content type to one InferenceRequest.

The body is JSON, ``multipart/form-data`` with files as parts, or the raw bytes of the pipeline's only file, with the
parameters in the query string.
"""

from starlette.datastructures import QueryParams

from app.api.bodies import JSON_HINT, check_no_query, check_query, is_json, media_type_of, off_loop, read_body
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.pipelines.forms import MAX_PARTS, check_given_once, parts_of
from app.codecs.kinds import FILE_TYPES, check_media_type, is_file_type
from app.core.errors import InvalidRequest, UnsupportedMediaType
from app.core.inference import BYTES, ELEMENT, Deadline, InferenceRequest
from app.pipelines.inputs import InputField
from app.pipelines.pipeline import Pipeline

NO_FILE = "Send application/json: no input of this pipeline is a file."
FILE_TYPE_HINT = f"{JSON_HINT}, or -H 'Content-Type: application/octet-stream' for a file"
FILE_HINT = "If an input is a file, declare `kind: image` or `kind: binary` for the input in gateway.yaml."


def check_is_start(exchange: Exchange) -> None:
    """Raises InvalidRequest for a client that wants to resume: its stream would begin again, with the first event."""
    if exchange.header(b"last-event-id"):
        raise InvalidRequest(
            "This stream cannot be resumed.",
            hint="Start it with POST /v1/streams and read it with GET: that stream resumes after Last-Event-ID.",
        )


async def read_inference(
    exchange: Exchange, pipeline: Pipeline, limits: Limits, deadline: Deadline
) -> InferenceRequest:
    """Raises the client errors of ``app.core.errors``."""
    limits = limits.of(pipeline)
    content_type = exchange.header(b"content-type") or ""
    media_type = media_type_of(content_type)
    if is_json(media_type):
        check_no_query(exchange)
        request = await off_loop(pipeline.request_of_json, await read_body(exchange, limits), exchange, deadline)
        exchange.forget_body()  # the tensors were copied, and the answer needs memory too
        return request
    if media_type == "multipart/form-data":
        check_no_query(exchange)
        body = await read_body(exchange, limits)
        lists = [field.name for field in pipeline.inputs if field.is_list_of_files]
        max_parts = MAX_PARTS + len(lists) * pipeline.max_items
        request = await off_loop(
            lambda body: pipeline.request_of_form(parts_of(content_type, body, lists, max_parts)),
            body,
            exchange,
            deadline,
        )
        exchange.forget_body()  # as above
        return request
    if is_file_type(media_type):
        file = file_field_of(pipeline)
        try:
            check_media_type(media_type, file.spec.kind)
        except ValueError as exc:
            raise UnsupportedMediaType(f"'{file.name}' {exc}.") from exc
        parameters = query_of(exchange, file.name)
        # A stream would keep the tensor's memory until its end.
        is_unary, start = exchange.record.transport == "unary", ELEMENT if file.tensor.datatype == BYTES else 0
        body = await read_body(exchange, limits, tensor_at=start if is_unary else None)
        return pipeline.request_of_form({**parameters, file.name: body})
    if not any(field.takes_file for field in pipeline.inputs):
        raise UnsupportedMediaType(NO_FILE, hint=JSON_HINT)
    raise UnsupportedMediaType(
        f"The content type must be application/json, multipart/form-data, {', '.join(FILE_TYPES)}.",
        hint=JSON_HINT if pipeline.raw_field is None else FILE_TYPE_HINT,
    )


def query_of(exchange: Exchange, file: str) -> dict[str, str]:
    """The parameters of a raw body, whose field is ``file``. Raises InvalidRequest or InvalidInput."""
    check_query(exchange)
    query = QueryParams(exchange.scope["query_string"])
    check_given_once([file, *(name for name, _ in query.multi_items())])
    return dict(query)


def file_field_of(pipeline: Pipeline) -> InputField:
    """The field of a raw body. Raises UnsupportedMediaType."""
    if (field := pipeline.raw_field) is not None:
        return field
    if not any(field.takes_file for field in pipeline.inputs):
        has_bytes = any(field.tensor.datatype == BYTES for field in pipeline.inputs)
        raise UnsupportedMediaType(NO_FILE, hint=FILE_HINT if has_bytes else JSON_HINT)
    raise UnsupportedMediaType(
        "Raw bytes are accepted only by a pipeline whose one required input is a file.",
        hint="Send application/json or multipart/form-data instead.",
    )
