"""The inference operations of one model. Each operation also exists under ``/versions/{version}``."""

from app.api.oip.openapi.answers import error_answers, ref, stream_error_answers
from app.api.oip.openapi.schemas import generate_request, generate_result, infer_request
from app.api.openapi.answers import answer, json_answer, operation
from app.api.openapi.inference import INFERENCE_ERRORS, TIMEOUT_HEADER
from app.domain import errors
from app.domain.json_schema import Schema
from app.domain.model import ModelConfig

_POSSIBLE = (*INFERENCE_ERRORS, errors.UnknownModel)
_OF_MODEL = error_answers(*_POSSIBLE, of_model=True)
_OF_GENERATION = error_answers(*_POSSIBLE)
_OF_STREAM = stream_error_answers(*_POSSIBLE)

_DESCRIPTIONS = {
    "infer": "The Open Inference Protocol: tensors as JSON, or as binary data after the JSON.",
    "generate": "Triton's generate extension: inputs by name, and one response.",
    "generate_stream": "Triton's generate extension: inputs by name, and each response as an event.",
}


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
        f"{path}/infer": _post(
            name, "infer", "infer", {"200": json_answer("The outputs", ref("OipInferResult")), **_OF_MODEL}
        ),
        f"{path}/generate": _post(
            name, "generate", "generate", {"200": json_answer("The one response", generated), **_OF_GENERATION}
        ),
        f"{path}/generate_stream": _post(
            name, "generate_stream", "generate", {"200": answer("The responses", events), **_OF_STREAM}
        ),
    }


def _post(name: str, verb: str, request: str, answers: Schema) -> Schema:
    summary = f"{verb} with model {name}"
    described = operation(f"oip_{verb}_{name}", name, summary, _DESCRIPTIONS[verb], answers, TIMEOUT_HEADER)
    content = {"application/json": {"schema": ref(f"{name}_{request}")}}
    return {"post": described | {"requestBody": {"required": True, "content": content}}}
