"""The examples of a pipeline: request bodies with their files, from the sample and the examples of gateway.yaml."""

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from app.api.bodies import Limits
from tests.api.conftest import PNG, READ, READER, WRITER
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served

CONFIG = """
pipelines:
  read:
    model: reader
    inputs: {image: {tensor: IMAGE, kind: image}, note: {tensor: NOTE, kind: text, optional: true}}
    early_exit: [{reason: no_text, error: {code: ALREADY_EXISTS, message: EXIT}}]
    sample: {image: pictures/sign.png}
    warmup: false
    examples:
      noted: {note: "<b>", image: pictures/sign.png}
      absent: {image: pictures/absent.png}
      large: {image: pictures/large.png}
      larger: {image: pictures/larger.png}
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
  gone:
    model: absent
    readiness: optional
    sample: {}
"""
BODY = {"image": base64.b64encode(PNG).decode()}
MAX_BODY_BYTES = 4096
NAMES = ["sample", "noted", "absent", "large", "larger"]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "sign.png").write_bytes(PNG)
    (tmp_path / "pictures" / "large.png").write_bytes(PNG.ljust(MAX_BODY_BYTES, b"\0"))
    (tmp_path / "pictures" / "larger.png").write_bytes(PNG.ljust(MAX_BODY_BYTES + 1, b"\0"))
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    engine = FakeEngine.of(READER, WRITER, answers=[READ])
    async with served(engine, tmp_path / "gateway.yaml", limits=Limits(MAX_BODY_BYTES)) as found:
        yield found


@pytest.mark.parametrize(("name", "body"), [("sample", BODY), ("noted", BODY | {"note": "<b>"})])
async def test_an_example_is_a_request_that_can_be_sent_as_it_is(api: Served, name: str, body: dict[str, str]) -> None:
    answer = await api.client.get(f"/v1/pipelines/read/examples/{name}")
    assert (answer.headers["content-type"], answer.json()) == ("application/json", body)
    sent = await api.client.post("/v1/pipelines/read", content=answer.content, headers={"Content-Type": "text/x+json"})
    assert sent.status_code == 200
    assert api.engine.requests[0].inputs[0].array.tolist() == [PNG]


async def test_the_description_lists_the_examples_with_their_files(api: Served) -> None:
    examples = (await api.client.get("/v1/pipelines/read")).json()["examples"]
    assert [each["name"] for each in examples] == NAMES
    assert examples[0]["files"] == {"image": "pictures/sign.png"}
    assert (await api.client.get("/v1/pipelines/write")).json()["examples"] == []


@pytest.mark.parametrize(
    ("path", "code", "detail"),
    [
        ("read/examples/notd", "unknown_example", "The pipeline has no such example; did you mean 'noted'?"),
        ("write/examples/sample", "unknown_example", "The pipeline has no such example"),
        ("reed/examples/sample", "unknown_pipeline", "There is no such pipeline; did you mean 'read'?"),
        ("gone/examples/sample", "model_not_ready", "Pipeline 'gone' is not ready"),
        ("read/examples/..%2fsample", "not_found", ""),
    ],
)
async def test_unknown_names_are_errors(api: Served, path: str, code: str, detail: str) -> None:
    answer = await api.client.get(f"/v1/pipelines/{path}")
    assert (answer.status_code, answer.json()["code"]) == (503 if code == "model_not_ready" else 404, code)
    assert answer.json()["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("name", "detail", "logged"),
    [
        ("absent", "A file of this example cannot be read; see the log for the cause.", "No such file or directory"),
        ("larger", "A file of this example cannot be read; see the log for the cause.", "is larger than 4096 bytes"),
        ("large", "This example is larger than GATEWAY_MAX_BODY_BYTES, so it cannot be sent.", ""),
    ],
)
async def test_an_example_that_cannot_be_sent_is_404(
    api: Served, name: str, detail: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await api.client.get(f"/v1/pipelines/read/examples/{name}")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_example")
    assert answer.json()["detail"] == detail
    assert logged in caplog.text


@pytest.mark.parametrize(("missing_bytes", "statuses"), [(0, {200}), (1, {429})])
async def test_an_example_counts_as_a_body_until_it_is_sent(
    tmp_path: Path, missing_bytes: int, statuses: set[int]
) -> None:
    size = len(orjson.dumps({"PROMPT": "x"}))
    (tmp_path / "gateway.yaml").write_text("pipelines: {write: {model: writer, examples: {short: {PROMPT: x}}}}")
    limits = Limits(MAX_BODY_BYTES, max_bytes_in_flight=size - missing_bytes)
    async with served(FakeEngine.of(WRITER), tmp_path / "gateway.yaml", limits=limits) as api:
        answers = [await api.client.get("/v1/pipelines/write/examples/short") for _ in range(3)]
    assert {answer.status_code for answer in answers} == statuses


async def test_a_changed_file_is_served_without_a_reload(api: Served, tmp_path: Path) -> None:
    (tmp_path / "pictures" / "absent.png").write_bytes(b"GIF89a")
    answer = await api.client.get("/v1/pipelines/read/examples/absent")
    assert answer.json() == {"image": base64.b64encode(b"GIF89a").decode()}


async def test_examples_are_reloaded_with_the_file(api: Served, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(CONFIG.replace("noted:", "renamed:"))
    os.utime(config, (1, 1))
    catalog = api.gateway.inference.catalog
    await catalog.refresh()
    await catalog.warm_up()
    assert (await api.client.get("/v1/pipelines/read/examples/renamed")).json() == BODY | {"note": "<b>"}
    assert (await api.client.get("/v1/pipelines/read/examples/noted")).status_code == 404


async def test_the_document_names_the_examples(api: Served) -> None:
    paths = (await api.client.get("/openapi.json")).json()["paths"]
    (parameter,) = paths["/v1/pipelines/read/examples/{example}"]["get"]["parameters"]
    assert parameter["schema"] == {"type": "string", "enum": NAMES}
    assert "/v1/pipelines/write/examples/{example}" not in paths
