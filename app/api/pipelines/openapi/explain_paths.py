"""The explanation of a request, and the header that asks for it."""

from app.api.openapi.answers import json_answer, operation, problems
from app.domain import errors
from app.domain.errors import Outcome
from app.domain.json_schema import Schema, enum_of
from app.observability.explain.states import State
from app.observability.explain.tree import Kind

EXPLAIN_HEADER: Schema = {
    "name": "X-Explain",
    "in": "header",
    "schema": {"type": "string", "examples": ["1"]},
    "description": "`1`: trace this request, so that it can be explained. Other values have no effect, and neither has "
    "`1` of callers that may not explain.",
}
_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_MS: Schema = {"type": "number", "minimum": 0}
_MS_OR_NULL: Schema = {"type": ["number", "null"], "minimum": 0}
_NAMES: Schema = {"type": "array", "items": _TEXT}


def _object(properties: Schema, description: str = "") -> Schema:
    schema: Schema = {"type": "object", "required": list(properties), "properties": properties}
    return schema | ({"description": description} if description else {})


_PHASE = _object({"name": enum_of(["read", "queue", "triton", "respond"]), "start_ms": _MS, "duration_ms": _MS})
_SPAN = _object(
    {
        "id": _TEXT,
        "parent": _TEXT_OR_NULL,
        "name": _TEXT,
        "kind": enum_of(map(str, Kind)),
        "model": _TEXT,
        "version": _TEXT,
        "start_ms": _MS,
        "duration_ms": _MS,
        "queue_ms": _MS_OR_NULL,
        "compute_input_ms": _MS_OR_NULL,
        "compute_ms": _MS_OR_NULL,
        "compute_output_ms": _MS_OR_NULL,
        "state": enum_of(map(str, State)),
    },
    "One run of a model. `parent`: the run above it",
)
_EXPLANATION = _object(
    {
        "request_id": _TEXT,
        "pipeline": _TEXT,
        "model": _TEXT,
        "outcome": {**enum_of([*map(str, Outcome), None]), "description": "null while the request runs"},
        "early_exit": _TEXT_OR_NULL,
        "error": _TEXT_OR_NULL,
        "status": {"type": ["integer", "null"]},
        "total_ms": _MS_OR_NULL,
        "gateway": {"type": "array", "items": _PHASE},
        "spans": {"type": "array", "items": _SPAN},
        "steps_not_run": _NAMES,
        "is_complete": {"type": "boolean", "description": "If false, ask again: Triton's spans arrive later"},
        "notes": _NAMES,
    },
    "Times are milliseconds since the gateway received the request",
)
_ID: Schema = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": _TEXT,
    "description": "The `X-Request-ID` of the answer",
}


def _explain() -> Schema:
    answers = {"200": json_answer("The explanation", _EXPLANATION), **problems(errors.UnknownRequest)}
    description = "The phases in the gateway and Triton's spans of a recent request that had `X-Explain: 1`."
    return operation("explain_request", "requests", "Where the time of a request went", description, answers, _ID)


EXPLAIN_PATHS: Schema = {"/v1/requests/{id}/explain": {"get": _explain()}}
