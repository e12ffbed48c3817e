"""The health operations, which are independent of the dialects."""

from app.api.openapi.answers import json_answer, operation, problems
from app.domain.json_schema import Schema, const_of, enum_of
from app.pipelines.form import State

_TEXT: Schema = {"type": "string"}
STATE: Schema = enum_of(map(str, State))
_READINESS: Schema = {
    "type": "object",
    "required": ["status", "triton", "pipelines", "state_detail"],
    "properties": {
        "status": enum_of(["ready", "not_ready", "draining"]),
        "triton": enum_of(["up", "down"]),
        "pipelines": {"type": "object", "additionalProperties": STATE},
        "state_detail": {"type": "object", "additionalProperties": _TEXT},
    },
}


def _live() -> Schema:
    schema: Schema = {"type": "object", "required": ["status"], "properties": {"status": const_of("live")}}
    return {"200": json_answer("The gateway answers", schema), **problems()}


def _ready() -> Schema:
    return {
        "200": json_answer("Every required pipeline can be called", _READINESS),
        **problems(),
        "503": json_answer("Triton or a required pipeline is not ready, or the gateway is draining", _READINESS),
    }


HEALTH_PATHS: Schema = {
    "/health/live": {
        "get": operation(
            "live", "health", "Whether the gateway answers", "For a liveness probe. It does not ask Triton.", _live()
        )
    },
    "/health/ready": {
        "get": operation(
            "ready",
            "health",
            "Whether the pipelines can be called",
            "For a readiness probe. The answer has the state of each pipeline, with 200 and with 503.",
            _ready(),
        )
    },
}
