"""Requests that need a key, the scope of a key, and 401 and 403 in each dialect."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.routing import Route

from tests.api.conftest import FINAL, ORIGIN, counted, word
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.keys import bearer, entry, key_text, write_keys
from tests.toolkit.models import model, response, tensor

CONFIG = """
pipelines:
  ocr:
    model: reader
    inputs: {text: {tensor: IN, kind: text}}
    outputs: {text: {tensor: OUT, kind: text}}
    warmup: false
    stream: {commit_s: 0.05}
    openai: {completions: {prompt: text}}
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    warmup: false
    stream: {commit_s: 0.05}
    openai: {completions: {}}
oip: {models: [plain]}
"""
READER = model("IN BYTES [1]", "OUT BYTES [1]", name="reader")
WRITER = model("PROMPT BYTES [1]", "TEXT BYTES [1]", name="writer", decoupled=True)
PLAIN = model("X BYTES [1]", "Y BYTES [1]", name="plain")
READ = response(tensor("OUT", "BYTES", [b"hi"]))
KEYS = [
    entry("all", priority=2, limits={"in_flight": 4}),
    entry("reads", pipelines=["ocr", "later"]),
    entry("openai", dialects=["openai"]),
    entry("plain", pipelines=["plain"], dialects=["oip"]),
    entry("old", expires="2020-01-01T00:00:00Z"),
]
INFER = {"inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
RUNS: dict[str, Any] = {
    "/v1/pipelines/ocr": {"text": "x"},
    "/v1/pipelines/ocr/stream": {"text": "x"},
    "/v1/streams": {"pipeline": "ocr", "inputs": {"text": "x"}},
    "/v1/completions": {"model": "ocr", "prompt": "x"},
    "/v2/models/reader/infer": INFER,
    "/v2/models/reader/generate": {"IN": "x"},
}
OPEN = ["/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/", "/console/console.js", "/docs"]
OPEN += ["/docs/errors", "/docs/errors/unauthenticated", "/docs/assets/docs.js"]


api = gateway_fixture(CONFIG, READER, WRITER, PLAIN, answers=[READ], keys=KEYS, origins=(ORIGIN,))


class TestTheKey:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer  "},
            {"Authorization": f"Basic {key_text('all')}"},
            {"Authorization": key_text("all")},
            bearer("unknown"),
            {"X-API-Key": ""},
            {"X-API-Key": key_text("all")[:-1]},
            bearer("old"),
            {**bearer("all"), "X-API-Key": key_text("reads")},
            {**bearer("all"), "X-API-Key": "x"},
        ],
        ids=lambda headers: "+".join(f"{name} {value[:18]}" for name, value in headers.items()) or "none",
    )
    async def test_no_valid_key_is_401(self, api: Served, headers: dict[str, str]) -> None:
        """The body is not read."""

        async def body() -> AsyncIterator[bytes]:
            raise AssertionError("the body was read")
            yield b""

        for path in RUNS:
            sent = {"Content-Type": "application/json", **headers}
            answer = await api.client.post(path, content=body(), headers=sent)
            assert (path, answer.status_code) == (path, 401)
            assert (path, answer.headers["www-authenticate"]) == (path, "Bearer")
            assert answer.headers["x-request-id"], path
            assert not api.engine.requests, path
            assert "tgw_" not in answer.text, path

    @pytest.mark.parametrize(
        "headers",
        [
            bearer("all"),
            {"Authorization": f"bEaReR   {key_text('all')} "},
            {"X-API-Key": key_text("all")},
            {**bearer("all"), "X-API-Key": key_text("all")},
            {"Authorization": "Basic dTpw", "X-API-Key": key_text("all")},
        ],
        ids=["bearer", "case", "x-api-key", "same key in both", "basic auth for a proxy"],
    )
    async def test_a_key_is_sent_in_either_header(self, api: Served, headers: dict[str, str]) -> None:
        for path, body in RUNS.items():
            answer = await api.client.post(path, json=body, headers=headers)
            assert (path, answer.status_code) == (path, 201 if path == "/v1/streams" else 200), answer.text

    async def test_two_headers_of_one_name_are_401(self, api: Served) -> None:
        headers = [("Authorization", f"Bearer {key_text(each)}") for each in ("all", "reads")]
        answer = await api.client.get("/v1/pipelines", headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (401, "The request has several API keys.")

    async def test_a_rejected_request_is_counted(self, api: Served) -> None:
        await api.client.post("/v1/pipelines/ocr", json={})
        await api.client.post("/v1/pipelines/ocr/stream", json={}, headers=bearer("openai"))
        assert counted(api, "-", "unary") == {"client_error": 1}
        assert counted(api, "-", "stream") == {"client_error": 1}


async def test_each_dialect_has_its_own_form_of_401_and_403(api: Served) -> None:
    completion = {"model": "write", "prompt": "x"}
    missing = await api.client.post("/v1/pipelines/ocr", json={"text": "x"})
    assert missing.headers["content-type"] == "application/problem+json"
    assert missing.json()["hint"] == "Send `Authorization: Bearer <key>` or `X-API-Key: <key>`."
    outside = await api.client.post("/v1/pipelines/write", json={"prompt": "x"}, headers=bearer("reads"))
    assert (missing.json()["code"], outside.status_code, outside.json()["code"]) == (
        "unauthenticated",
        403,
        "forbidden",
    )
    assert "www-authenticate" not in outside.headers
    assert outside.json()["hint"].endswith(
        "ask an operator to add it to the `pipelines` of this key in the file of API keys."
    )
    assert (await api.client.post("/v2/models/reader/infer", json=INFER)).json().keys() == {"error"}
    for verb in ("infer", "generate", "generate_stream"):
        outside = await api.client.post(f"/v2/models/writer/{verb}", json={}, headers=bearer("reads"))
        assert outside.status_code == 403
        assert outside.json()["error"].startswith("This API key does not allow this model. Use another key, or ask")
    error = (await api.client.post("/v1/completions", json=completion)).json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "unauthenticated")
    outside = await api.client.post("/v1/completions", json=completion, headers=bearer("reads"))
    assert (outside.status_code, outside.json()["error"]["type"]) == (403, "permission_error")
    assert outside.headers["x-should-retry"] == "false"


class TestScopes:
    @pytest.mark.parametrize(("key", "allowed"), [("openai", "openai"), ("plain", "oip")])
    async def test_a_dialect_outside_the_scope_is_403(self, api: Served, key: str, allowed: str) -> None:
        own = {"openai": {"/v1/completions"}, "oip": {"/v2/models/reader/infer", "/v2/models/reader/generate"}}
        for path in RUNS.keys() - own[allowed]:
            answer = await api.client.post(path, json=RUNS[path], headers=bearer(key))
            assert answer.status_code == 403
            assert f"{allowed}" not in answer.text or allowed == "openai"
            assert "ask an operator to add it to the `dialects` of this key in the file of API keys." in answer.text
        assert not api.engine.requests

    @pytest.mark.parametrize("name", ["write", "nothing", "plain", "ocr%20"])
    async def test_names_outside_the_scope_are_not_disclosed(self, api: Served, name: str) -> None:
        """The error for an existing pipeline or model equals the error for an unknown name."""
        started = {"pipeline": name, "inputs": {}}
        bodies = {f"/v1/pipelines/{name}": {}, "/v1/completions": {"model": name, "prompt": ""}, "/v1/streams": started}
        for path, body in bodies.items():
            answer = await api.client.post(path, json=body, headers=bearer("reads"))
            assert answer.status_code == 403
            assert "This API key does not allow this pipeline." in answer.text
        paths = [f"/v1/pipelines/{name}", f"/v1/pipelines/{name}/examples/sample", f"/v1/models/{name}"]
        for path in [*paths, f"/v2/models/{name}", f"/v2/models/{name}/ready"]:
            answer = await api.client.get(path, headers=bearer("reads"))
            assert answer.status_code == 403

    @pytest.mark.parametrize("method", ["GET", "POST"])
    async def test_an_unknown_name_inside_the_scope_is_404(self, api: Served, method: str) -> None:
        answer = await api.client.request(method, "/v1/pipelines/later", json={}, headers=bearer("reads"))
        assert answer.status_code == 404
        assert not any(name in answer.text for name in ("ocr", "write"))

    async def test_a_key_for_a_pipeline_also_allows_its_model_and_may_name_a_model(self, api: Served) -> None:
        answer = await api.client.post("/v2/models/reader/infer", json=INFER, headers=bearer("reads"))
        assert answer.status_code == 200
        index = (await api.client.post("/v2/repository/index", headers=bearer("plain"))).json()
        assert [row["name"] for row in index] == ["plain"]
        assert (await api.client.get("/v2/models/plain", headers=bearer("plain"))).status_code != 403
        assert (await api.client.get("/v2/models/reader", headers=bearer("plain"))).status_code == 403

    async def test_lists_and_the_document_show_only_allowed_pipelines_and_models(self, api: Served) -> None:
        async def get(path: str, key: str) -> Any:
            return (await api.client.get(path, headers=bearer(key))).json()

        assert [each["name"] for each in (await get("/v1/pipelines", "reads"))["pipelines"]] == ["ocr"]
        assert [each["name"] for each in (await get("/v1/pipelines", "all"))["pipelines"]] == ["ocr", "write"]
        assert list((await get("/v1/statistics", "reads"))["pipelines"]) == ["ocr"]
        assert list((await get("/v1/statistics", "all"))["pipelines"]) == ["ocr", "write"]
        assert [each["id"] for each in (await get("/v1/models", "reads"))["data"]] == ["ocr"]
        assert [each["id"] for each in (await get("/v1/models", "openai"))["data"]] == ["ocr", "write"]
        paths = {key: set((await get("/openapi.json", key))["paths"]) for key in ("all", "reads", "openai")}
        assert {"/v1/pipelines/ocr", "/v1/pipelines/write", "/v2/models/plain/infer"} <= paths["all"]
        assert {"/v1/pipelines/ocr", "/v2/models/reader/infer"} <= paths["reads"]
        hidden = {"/v1/pipelines/write", "/v2/models/writer/infer", "/v2/models/plain/infer"}
        assert not hidden & paths["reads"]
        assert not [path for path in paths["openai"] if path.startswith(("/v1/pipelines", "/v2", "/v1/streams"))]


class TestWithoutKey:
    async def test_pages_and_health_need_no_key(self, api: Served) -> None:
        for headers in ({}, bearer("unknown"), bearer("openai")):
            statuses = {path: (await api.client.get(path, headers=headers)).status_code for path in OPEN}
            assert statuses == dict.fromkeys(OPEN, 200)

    async def test_readiness_lists_only_allowed_pipelines(self, api: Served) -> None:
        names = [
            list((await api.client.get("/health/ready", headers=headers)).json()["pipelines"])
            for headers in ({}, bearer("unknown"), bearer("reads"), bearer("all"))
        ]
        assert names == [[], [], ["ocr"], ["ocr", "write"]]
        assert list((await api.admin.get("/health/ready")).json()["pipelines"]) == ["ocr", "write"]

    async def test_a_preflight_needs_no_key(self, api: Served) -> None:
        headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization, x-api-key"
        answer = await api.client.options("/v1/pipelines/ocr", headers=headers)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        refused = await api.client.post("/v1/pipelines/ocr", json={}, headers={"Origin": ORIGIN})
        assert refused.headers["access-control-allow-origin"] == ORIGIN

    async def test_every_other_route_requires_a_key(self, api: Served) -> None:
        keyless = set()
        for route in (each for each in api.app.routes if isinstance(each, Route)):
            path = route.path.replace("{version}", "1").replace("{code}", "internal")
            for method in route.methods or ():
                if (await api.client.request(method, path)).status_code != 401:
                    keyless.add(route.path)
        assert keyless | {"/docs/"} == {
            *("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"),
            *("/", "/console/settings", "/docs", "/docs/", "/docs/errors", "/docs/errors/{code}", "/v1/streams/{id}"),
        }


class TestStreams:
    async def started(self, api: Served, key: str) -> str:
        api.engine.answers = [word(b"a", 1), 5.0, FINAL]
        body = {"pipeline": "write", "inputs": {"prompt": "x"}}
        answer = await api.client.post("/v1/streams", json=body, headers=bearer(key))
        assert answer.status_code == 201
        return str(answer.headers["location"])

    @pytest.mark.parametrize(
        ("headers", "status"),
        [({}, 200), (bearer("all"), 200), (bearer("reads"), 403), (bearer("unknown"), 401), (bearer("old"), 401)],
        ids=["none", "owner", "another key", "unknown", "expired"],
    )
    async def test_a_stream_id_needs_no_key_but_rejects_other_keys(
        self, api: Served, headers: dict[str, str], status: int
    ) -> None:
        url = await self.started(api, "all")
        assert (await api.client.head(url, headers=headers)).status_code == status
        deleted = await api.client.delete(url, headers=headers)
        assert deleted.status_code == (204 if status == 200 else status)
        await api.client.delete(url)
        if status in (200, 403):
            assert (await api.client.get("/v1/streams/unknown", headers=headers)).status_code == 404

    async def test_a_rotated_key_still_owns_its_streams(self, api: Served) -> None:
        url = await self.started(api, "all")
        assert api.gateway.keys is not None
        write_keys(api.folder / "keys.yaml", entry("all") | {"sha256": entry("next")["sha256"]})
        await api.gateway.keys.follow()
        assert (await api.client.head(url, headers=bearer("all"))).status_code == 401
        assert (await api.client.head(url, headers=bearer("next"))).status_code == 200
        assert (await api.client.delete(url)).status_code == 204


async def test_logs_metrics_and_descriptions_never_contain_a_key(api: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path, body in RUNS.items():
        for headers in (bearer("all"), {"X-API-Key": key_text("reads")}, bearer("unknown"), bearer("old")):
            await api.client.post(path, json=body, headers=headers)
    lines = [json.dumps(vars(record), default=repr) for record in caplog.records if record.name != "httpx"]
    assert not any("tgw_" in line for line in lines)
    assert {getattr(record, "key", None) for record in caplog.records} == {None, "all", "reads"}, "their ids"
    refused = [record for record in caplog.records if getattr(record, "code", "") == "unauthenticated"]
    assert refused
    assert all(record.levelno == logging.INFO for record in refused if getattr(record, "transport", None))
    page = (await api.admin.get("/metrics")).text
    assert 'key="' not in page
    assert "tgw_" not in page
    described = await api.client.get("/v1/pipelines/ocr", headers=bearer("all"))
    assert "tgw_" not in described.text


async def test_samples_read_the_key_from_the_environment(api: Served) -> None:
    samples = (await api.client.get("/v1/pipelines/ocr", headers=bearer("all"))).json()["samples"]
    assert '-H "Authorization: Bearer $API_KEY"' in samples["curl"]
    assert '-H "Authorization: Bearer $API_KEY"' in samples["curl_stream"]
    assert '"Authorization": `Bearer ${process.env.API_KEY}`' in samples["javascript"]
    assert """headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}""" in samples["python"]
    compile(samples["python"], "sample", "exec")


async def test_each_operation_declares_its_security(api: Served) -> None:
    document = (await api.client.get("/openapi.json", headers=bearer("all"))).json()
    assert document["components"]["securitySchemes"].keys() == {"bearer", "apiKey"}
    key = [{"bearer": []}, {"apiKey": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if "/health/" in path:
                assert "security" not in operation
                assert "401" not in operation["responses"]
                continue
            assert operation["security"] == ([{}, *key] if path == "/v1/streams/{id}" else key)
            assert {"401", "403"} <= operation["responses"].keys()
