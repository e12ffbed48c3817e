"""``/v1/models``: the pipelines that declare ``openai:``."""

from tests.api.openai.conftest import Api, refusal


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
