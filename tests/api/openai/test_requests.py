"""``/v1/models``, and errors in OpenAI's format."""

import json

import pytest

from app.api.error_table import ROW_BY_ERROR
from app.api.openai.requests import openai_error_response
from app.core import errors
from app.core.errors import ContractViolation, FieldProblem, GatewayError
from app.pipelines.body import MAX_PROBLEMS
from tests.api.openai.conftest import Api, refusal

TYPES = {4: "invalid_request_error", 5: "server_error"}
TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_of(kind: type[GatewayError], detail: str = "It failed.", **more: object) -> GatewayError:
    return kind(detail, tensor="T") if kind is ContractViolation else kind(detail, **more)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ROW_BY_ERROR, ids=lambda kind: kind.code)
def test_every_error_has_openais_format(kind: type[GatewayError]) -> None:
    response = openai_error_response(error_of(kind), "rid")
    error = json.loads(response.body)["error"]
    assert error["message"] == "It failed."
    assert error["type"] == TYPE_BY_STATUS.get(response.status_code, TYPES[response.status_code // 100])
    assert error["code"] == ("model_not_found" if kind is errors.UnknownPipeline else kind.code)
    assert response.headers["x-should-retry"] == str(kind.retryable).lower()
    assert response.headers.get("retry-after") == (str(kind.retry_after_s) if kind.retry_after_s else None)


def test_param_names_the_invalid_field() -> None:
    problems = [FieldProblem(f"field {index}", "x" * 2000) for index in range(MAX_PROBLEMS)]
    response = openai_error_response(errors.InvalidInput("y" * 9000, hint="z" * 9000, errors=problems), "rid")
    assert response.status_code == 400
    assert json.loads(response.body)["error"]["param"] == "field 0"
    assert len(response.body) <= 4096


def test_a_hint_is_appended_to_the_message() -> None:
    response = openai_error_response(errors.ModelError("It failed.", hint="Ask."), "rid")
    assert json.loads(response.body)["error"]["message"] == "It failed. Ask."


async def test_pipelines_with_openai_are_listed_as_models(api: Api) -> None:
    answer = (await api.client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["write", "echo", "embed"]
    assert {(model["object"], model["owned_by"]) for model in answer["data"]} == {("model", "triton-gateway")}


async def test_a_model_has_its_own_address(api: Api) -> None:
    listed = (await api.client.get("/v1/models")).json()["data"][0]
    assert (await api.client.get("/v1/models/write")).json() == listed


async def test_a_pipeline_without_openai_is_not_a_model(api: Api) -> None:
    for name in ("other", "nobody"):
        assert refusal(await api.client.get(f"/v1/models/{name}")) == (404, "model_not_found", None)


async def test_the_error_for_an_unknown_id_lists_the_models(api: Api) -> None:
    names = {model["id"] for model in (await api.client.get("/v1/models")).json()["data"]}
    answer = await api.client.post("/v1/completions", json={"model": "nobody", "prompt": "a"})
    message = answer.json()["error"]["message"]
    assert message.startswith("There is no model with this id; valid here: ")
    assert set(message.partition("valid here: ")[2].split(", ")) == names
