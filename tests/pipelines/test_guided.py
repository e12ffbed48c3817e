"""The fields that hold the answer of a model to a JSON schema, with each preset."""

from typing import Any

import pytest

from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.pipeline import Pipeline
from tests.pipelines.test_presets import sampling, sent, served
from tests.toolkit.models import model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def guided(p: Pipeline) -> dict[str, Any]:
    assert p.openai is not None
    assert p.openai.completions is not None
    return p.openai.completions.guided_fields(SCHEMA)


def test_vllm_gets_an_object_as_a_text() -> None:
    p = served("vllm")
    assert sampling(p, **guided(p))["structured_outputs"] == f'{{"json":{TEXT}}}'


def test_tensorrt_llm_gets_the_schema_and_its_type() -> None:
    p = served("tensorrt_llm")
    tensors = sent(p, **guided(p))
    assert tensors["guided_decoding_guide_type"] == [b"json_schema"]
    assert tensors["guided_decoding_guide"] == [TEXT.encode()]


def test_a_backend_that_cannot_gets_no_fields() -> None:
    lacking = model(["text_input BYTES [1]", "max_tokens INT32 [1]"], "text_output BYTES [-1]", decoupled=True)
    assert guided(served("tensorrt_llm", lacking)) == {}
    assert guided(served("tensorrt_llm_api")) == {}


@pytest.mark.parametrize(
    ("keys", "location", "text"),
    [
        ({"parameter": "structured"}, "parameter", "'structured' is not a parameter of the pipeline; did you mean"),
        ({"parameter": "stop"}, "parameter", "'stop' must have type: object"),
        ({"parameter": "structured_outputs", "also": {"seed": "x"}}, "also.seed", "has a value that does not fit"),
        ({"parameter": "structured_outputs", "also": {"prompt": 1}}, "also.prompt", "'prompt' is not a parameter"),
    ],
)
def test_mismatches_are_reported_with_their_key(keys: dict[str, Any], location: str, text: str) -> None:
    with pytest.raises(PipelineMismatch) as caught:
        served("vllm", openai={"guided": keys})
    assert ".".join(map(str, caught.value.location)) == f"openai.guided.{location}"
    assert caught.value.text.startswith(text)
