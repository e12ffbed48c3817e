"""Known messages of backends become errors of the caller; every other message stays an error of the model."""

import pytest
from pydantic import ValidationError

from app.core.errors import ContextLengthExceeded, GatewayError, InvalidInput, ModelError, UpstreamError
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.pipeline import LONGEST_MESSAGE
from app.pipelines.spec import PipelineSpec
from tests.toolkit.models import model, pipeline

CONFIG = model("text_input BYTES [1]", "text_output BYTES [1]", name="llama", decoupled=True)
RULES = [
    {
        "message_pattern": r"prompt \(length \d+\) is longer than the maximum model length",
        "code": "context_length_exceeded",
        "field": "text_input",
    },
    {
        "message_pattern": "decoder prompt cannot be empty",
        "code": "invalid_input",
        "field": "text_input",
        "detail": "The prompt must not be empty.",
    },
    {"message_pattern": "^(Error generating stream: )?Grammar error: ", "code": "invalid_input", "field": "schema"},
    {
        "message_pattern": r"LoRA feature is not enabled\.",
        "code": "invalid_input",
        "detail": "There is no such adapter.",
    },
]
PARAMETERS = {"schema": {"type": "string", "optional": True}}

REFUSED = [
    (
        "The decoder prompt (length 4001) is longer than the maximum model length of 512",
        ContextLengthExceeded,
        ["text_input"],
        "The request is longer than the model's context.",
    ),
    ("The decoder prompt cannot be empty", InvalidInput, ["text_input"], "The prompt must not be empty."),
    ("Grammar error: Invalid type: nonsense", InvalidInput, ["schema"], "The model refused the input."),
    ("LoRA feature is not enabled.", InvalidInput, [], "There is no such adapter."),
]
"""Messages of vLLM, in vLLM's words."""


def error_of(message: str, grpc_code: str | None = None, **keys: object) -> GatewayError:
    """The error that a caller gets if the model fails with this message."""
    p = pipeline(CONFIG, refusals=RULES, parameters=PARAMETERS, stream=True, **keys)
    error = ModelError("Model 'llama' failed.")
    error.upstream = UpstreamError(grpc_code, message)
    with pytest.raises(GatewayError) as raised:
        p.early_exit_of(error, "rid")
    return raised.value


@pytest.mark.parametrize(
    ("grpc_code", "prefix"),
    [(None, ""), (None, "Error generating stream: "), ("INTERNAL", ""), ("INVALID_ARGUMENT", "")],
)
@pytest.mark.parametrize(("message", "kind", "fields", "detail"), REFUSED)
def test_a_known_message_is_an_error_of_the_caller(
    message: str, kind: type[GatewayError], fields: list[str], detail: str, *, grpc_code: str | None, prefix: str
) -> None:
    error = error_of(prefix + message, grpc_code)
    assert (type(error), [each.field for each in error.errors], error.detail) == (kind, fields, detail)
    assert error.upstream is not None
    assert message not in f"{error.detail}{error.hint}{error.errors}"


@pytest.mark.parametrize(
    "message",
    ["'NoneType' object has no attribute 'lora_name'", "out of memory", "x" * LONGEST_MESSAGE + REFUSED[3][0]],
)
def test_another_message_stays_an_error_of_the_model(message: str) -> None:
    assert type(error_of(message)) is ModelError


def test_an_early_exit_comes_first() -> None:
    exits = [{"reason": "empty", "error": {"code": "any", "message": REFUSED[1][0]}}]
    p = pipeline(CONFIG, refusals=RULES, parameters=PARAMETERS, early_exit=exits)
    error = ModelError("It failed.")
    error.upstream = UpstreamError(None, REFUSED[1][0])
    assert p.early_exit_of(error, "rid") == "empty"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"message_pattern": "(", "code": "invalid_input"}, "is not a regular expression"),
        ({"message_pattern": "", "code": "invalid_input"}, "at least 1"),
        ({"message_pattern": "x", "code": "model_error"}, "context_length_exceeded"),
        ({"message_pattern": "x", "code": "invalid_input", "detail": ""}, "at least 1"),
    ],
)
def test_a_wrong_rule_is_refused(rule: dict[str, str], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        PipelineSpec.model_validate({"model": "m", "refusals": [rule]})


def test_a_rule_names_a_field_of_the_pipeline() -> None:
    with pytest.raises(PipelineMismatch, match="did you mean 'text_input'"):
        pipeline(CONFIG, refusals=[{"message_pattern": "x", "code": "invalid_input", "field": "text_inputs"}])
