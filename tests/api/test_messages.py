"""Each common mistake of a caller gets an answer that says what to do instead."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import ModelError, UpstreamError
from tests.api.conftest import CONFIG, PNG, READER, WRITER, scripted
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served
from tests.toolkit.keys import bearer, entry, write_keys

READ = "/v1/pipelines/read"
WRITE = "/v1/pipelines/write"
JSON = {"Content-Type": "application/json"}
INFER = "/v2/models/reader/infer"


def infer(**members: Any) -> dict[str, Any]:
    tensor = {"name": "NOTE", "datatype": "BYTES", "shape": [1], "data": ["a"]} | members
    return {"inputs": [tensor]}


@pytest.mark.parametrize(
    ("path", "sent", "expected"),
    [
        (
            WRITE,
            {"json": {"promt": "x"}},
            (422, "'promt' is not a field of this pipeline; did you mean 'prompt'? (1 more).", ""),
        ),
        (
            WRITE,
            {"content": b"", "headers": JSON},
            (400, "The body is empty. Send a JSON object with 'prompt'.", ""),
        ),
        (
            READ,
            {"json": {"image": "https://example.com/sign.png"}},
            (422, "'image' must be base64 or a data: URL; the gateway does not download addresses.", ""),
        ),
        (
            f"{READ}/stream",
            {"json": {"image": ""}},
            (
                400,
                "This pipeline does not stream: POST /v1/pipelines/read returns its whole answer.",
                "An operator can declare `stream: true` for it in gateway.yaml.",
            ),
        ),
        (
            WRITE,
            {"content": b"x", "headers": {"Content-Type": "text/plain"}},
            (
                415,
                "Send application/json: no input of this pipeline is a file.",
                "With curl, add: -H 'Content-Type: application/json'",
            ),
        ),
        (
            WRITE,
            {"content": PNG, "headers": {"Content-Type": "image/png"}},
            (
                415,
                "Send application/json: no input of this pipeline is a file.",
                "If an input is a file, declare `kind: image` or `kind: binary` for the input in gateway.yaml.",
            ),
        ),
        (
            WRITE,
            {"content": b" " * 65537, "headers": JSON},
            (
                413,
                "The body has 65537 bytes, more than the limit of 65536 bytes.",
                "An operator can raise GATEWAY_MAX_BODY_BYTES.",
            ),
        ),
    ],
)
async def test_a_mistake_in_a_request_is_explained(
    api: Served, path: str, sent: Mapping[str, Any], expected: tuple[int, str, str]
) -> None:
    answer = await api.client.post(path, **sent)
    problem = answer.json()
    assert (answer.status_code, problem["detail"], problem.get("hint", "")) == expected


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (infer(name="NOTES"), "unexpected inference input 'NOTES' for model 'reader'; it has IMAGE, NOTE."),
        (infer(shape=[2]), "unexpected shape for input 'NOTE' for model 'reader'. Expected [1], got [2]."),
        (infer(data=["a", "b"]), "Expected 1 elements for shape [1], got 2."),
        (infer(data=[7]), "Input 'NOTE' has data that are not BYTES, or out of its range."),
    ],
)
async def test_a_mistake_in_a_request_of_tritons_form_is_explained(
    api: Served, sent: Mapping[str, Any], message: str
) -> None:
    answer = await api.client.post(INFER, json=sent)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


async def test_the_step_that_refused_the_input_is_named_with_the_fields_that_it_reads(tmp_path: Path) -> None:
    async with scripted(tmp_path) as api:
        text = CONFIG.replace("    warmup: false\n  write:", "    rejects_input: [reader]\n    warmup: false\n  write:")
        (tmp_path / "gateway.yaml").write_text(text)
        await api.gateway.inference.catalog.follow_file()
        await api.gateway.inference.catalog.follow_models()
        error = ModelError("Model 'reader' failed.")
        error.upstream = UpstreamError("INVALID_ARGUMENT", "reader: not an image")
        api.engine.answers = [error]
        problem = (await api.client.post(READ, content=PNG, headers={"Content-Type": "image/png"})).json()
    assert problem["code"] == "invalid_input"
    assert problem["detail"] == "Model 'reader' refused the input. It reads 'image' and 'note'."
    assert problem["hint"] == "The gateway's log has the model's message in the line with this request id."


class TestKeys:
    @pytest.fixture
    async def guarded(self, tmp_path: Path) -> AsyncIterator[Served]:
        keys = write_keys(tmp_path / "keys.yaml", entry("reads", pipelines=["read"], dialects=["pipelines"]))
        async with scripted(tmp_path, keys=keys) as gateway:
            yield gateway

    async def test_a_missing_key_is_explained(self, guarded: Served) -> None:
        problem = (await guarded.client.post(WRITE, json={"prompt": "x"})).json()
        assert problem["hint"] == "Send `Authorization: Bearer <key>` or `X-API-Key: <key>`."

    @pytest.mark.parametrize(("path", "scope"), [(WRITE, "pipelines"), ("/v1/completions", "dialects")])
    async def test_a_missing_scope_is_explained(self, guarded: Served, path: str, scope: str) -> None:
        answer = await guarded.client.post(path, json={"prompt": "x", "model": "write"}, headers=bearer("reads"))
        assert answer.status_code == 403
        assert f"ask an operator to add it to the `{scope}` of this key in the file of API keys." in answer.text


class TestUnknownPipelines:
    """Without gateway.yaml only Triton knows the pipelines."""

    @pytest.mark.parametrize("path", [WRITE, "/v1/completions"])
    async def test_a_request_gets_503_until_triton_answers(self, path: str) -> None:
        engine = FakeEngine.of(READER, WRITER)
        engine.is_up = False
        async with served(engine, None) as api:
            answer = await api.client.post(path, json={"prompt": "x", "model": "write"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "Triton cannot be reached, so the pipelines are not known yet." in answer.text

    @pytest.mark.parametrize("path", ["/v1/pipelines", "/v1/models"])
    async def test_the_list_is_503_until_triton_answers(self, path: str) -> None:
        engine = FakeEngine.of(READER, WRITER)
        engine.is_up = False
        async with served(engine, None) as api:
            assert (await api.client.get(path)).status_code == 503
            engine.is_up = True
            await api.gateway.inference.catalog.follow_models()
            assert (await api.client.get(path)).status_code == 200
