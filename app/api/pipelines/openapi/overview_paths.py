"""The operations about all pipelines together: their statistics, and the findings of the linter."""

from app.api.openapi.answers import json_answer, operation, problems
from app.domain import errors
from app.domain.errors import Outcome
from app.domain.json_schema import Schema, enum_of
from app.pipelines.linter.findings import Code, Severity

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object_of(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _counts(description: str, **names: object) -> Schema:
    return {"type": "object", "additionalProperties": _COUNT, "description": description, **names}


_TRANSPORT = _object_of(
    outcomes=_counts("Ended requests by outcome", propertyNames=enum_of(map(str, Outcome))),
    durations={
        **_list_of(_COUNT),
        "description": "How many answered requests (`ok` and `early_exit`) took at most each of `bounds_s`; then all",
    },
)
_PIPELINE = _object_of(
    unary=_TRANSPORT,
    stream=_TRANSPORT,
    early_exits=_counts("Early exits by reason"),
    in_flight={**_COUNT, "description": "Unary requests in progress"},
    active_streams=_COUNT,
    waiting={**_COUNT, "description": "Requests that wait for a slot"},
)
_STATISTICS = _object_of(
    time_s={"type": "number", "description": "Only the difference of two answers has a meaning"},
    bounds_s={**_list_of({"type": "number"}), "description": "The upper bounds of `durations`, in seconds"},
    pipelines={"type": "object", "additionalProperties": _PIPELINE},
)
_FINDING = _object_of(
    severity=enum_of(map(str, Severity)),
    code=enum_of(map(str, Code)),
    pipeline={"type": ["string", "null"], "description": "The pipeline of gateway.yaml that the finding is about"},
    model={"type": ["string", "null"]},
    step={"type": ["integer", "null"], "description": "The step of the ensemble, from 1"},
    tensor={"type": ["string", "null"]},
    text=_TEXT,
    solution={**_TEXT, "description": "What to do about findings with this code; names between backticks"},
)
_STATISTICS_ANSWERS = {"200": json_answer("The numbers of each pipeline", _STATISTICS), **problems()}
_FINDINGS_ANSWERS = {
    "200": json_answer("The findings", _object_of(findings=_list_of(_FINDING))),
    **problems(errors.UpstreamUnavailable),
}

OVERVIEW_PATHS: Schema = {
    "/v1/statistics": {
        "get": operation(
            "statistics",
            "catalog",
            "Requests and durations of each pipeline",
            "Counters since the start of the gateway, summed over its workers. Subtract two answers for rates.",
            _STATISTICS_ANSWERS,
        )
    },
    "/v1/findings": {
        "get": operation(
            "findings",
            "catalog",
            "What `triton-gateway check` finds in the models",
            "Mistakes in the running models and in gateway.yaml, each with its solution.",
            _FINDINGS_ANSWERS,
        )
    },
}
