"""The inference of one model. Each operation exists under ``/versions/{version}`` too."""

from app.api.oip.openapi.answers import error_answers, ref
from app.api.oip.openapi.schemas import generate_request, generate_result, infer_request
from app.api.openapi.answers import Schema, answer, json_answer, operation
from app.api.openapi.inference import INFERENCE_ERRORS, TIMEOUT_HEADER
from app.domain import errors
from app.domain.model import ModelConfig


def schemas_of(config: ModelConfig) -> Schema:
    requests = {"infer": infer_request(config), "generate": generate_request(config)}
    return {f"{config.name}_{what}": schema for what, schema in requests.items()} | {
        f"{config.name}_generated": generate_result(config)
    }


def paths_of(config: ModelConfig) -> Schema:
    path, name = f"/v2/models/{config.name}", config.name
    generated = ref(f"{name}_generated")
    events = {"text/event-stream": {"schema": {"type": "string"}, "x-event-schemas": {"message": generated}}}
    return {
        f"{path}/infer": _post(name, "infer", "infer", json_answer("The outputs", ref("OipInferResult"))),
        f"{path}/generate": _post(name, "generate", "generate", json_answer("The one response", generated)),
        f"{path}/generate_stream": _post(name, "generate_stream", "generate", answer("The responses", events)),
    }


def _post(name: str, verb: str, request: str, ok: Schema) -> Schema:
    answers = {"200": ok, **error_answers(*INFERENCE_ERRORS, errors.UnknownModel, of_model=True)}
    described = operation(f"oip_{verb}_{name}", name, f"{verb} with model {name}", answers, TIMEOUT_HEADER)
    content = {"application/json": {"schema": ref(f"{name}_{request}")}}
    return {"post": described | {"requestBody": {"required": True, "content": content}}}
