"""Allowed methods, HEAD, CORS, the security headers of pages, and the rules for browsers, partly over a real socket."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.api.bodies import MAX_QUERY_FIELDS
from app.api.endpoint import BrowserRules
from app.api.openapi import PAGE_HEADERS as HEADERS
from app.core.errors import ModelError
from app.process.gateway import browser_rules_of
from app.settings import read_settings
from tests.api.conftest import FINAL, ORIGIN, scripted, scripted_fixture, word
from tests.toolkit.gateway import Served
from tests.toolkit.listener import listening

FROM_PAGE = {"Origin": ORIGIN}
PAGES = ["/", "/console/console.js", "/docs", "/docs/assets/docs.js", "/docs/errors", "/docs/errors/internal"]
GETS = [
    "/v1/pipelines",
    "/v1/pipelines/read",
    "/v1/pipelines/read/examples/sample",
    "/health/live",
    "/health/ready",
    "/openapi.json",
    *PAGES,
]
ALLOWED = {
    "/v1/pipelines": "GET, HEAD",
    "/v1/pipelines/read": "GET, HEAD, POST",
    "/v1/pipelines/write/stream": "POST",
    "/v1/pipelines/read/examples/sample": "GET, HEAD",
    "/v1/pipelines/write/session": "GET, HEAD",
    "/v1/streams": "POST",
    "/v1/streams/abc": "GET, HEAD, DELETE",
    "/v1/pipelines/write/sessions": "POST",
    "/v1/sessions/abc": "POST, DELETE",
    "/health/live": "GET, HEAD",
    "/": "GET, HEAD",
    "/console/console.js": "GET, HEAD",
    "/docs/assets/swagger-ui.css": "GET, HEAD",
}
RANGES = ["bytes=0-9", "bytes=-5", "bytes=5-3", "bytes=99999999-", "bytes=0-1,5-9", "lines=1-2", "bytes", "x"]


@pytest.fixture
async def wire(api: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the same gateway, behind uvicorn with the gateway's own protocol."""
    async with listening(api.app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


@pytest.mark.parametrize("path", ["/health/live", "/v1/pipelines", "/openapi.json", "/docs/errors"])
async def test_too_many_query_fields_are_400_at_every_address(
    api: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await api.client.get(f"{path}?{'a&' * (MAX_QUERY_FIELDS - 1)}a")
    assert answer.status_code == 200
    monkeypatch.setattr("starlette.datastructures.parse_qsl", None)
    answer = await api.client.get(f"{path}?{'a&' * MAX_QUERY_FIELDS}a")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def test_cookies_are_never_parsed(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starlette.requests.cookie_parser", None)
    for client in (api.client, api.admin):
        answer = await client.get("/health/live", headers={"Cookie": 'a="' + '\\"' * 7000 + '"'})
        assert answer.status_code == 200


async def test_405_lists_the_allowed_methods(api: Served) -> None:
    for path, allowed in ALLOWED.items():
        for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "BREW"):
            answer = await api.client.request(method, path)
            assert (path, method, answer.status_code, answer.headers["allow"]) == (path, method, 405, allowed)
            assert answer.json()["code"] == "method_not_allowed"
            reads = " EventSource reads the stream that POST /v1/streams starts." * path.endswith("/stream")
            assert answer.json()["hint"] == f"Use one of: {allowed}.{reads}"
    for method in ("POST", "OPTIONS"):
        answer = await api.admin.request(method, "/metrics")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


class TestHead:
    async def test_head_has_the_headers_of_get_and_no_body(self, wire: httpx.AsyncClient) -> None:
        for path in GETS:
            got, head = await wire.get(path), await wire.head(path)
            assert (path, head.status_code, head.content) == (path, got.status_code, b"")
            changing = {"x-request-id", "server-timing", "date"}
            assert {name: value for name, value in head.headers.items() if name not in changing} == {
                name: value for name, value in got.headers.items() if name not in changing
            }, path
            assert int(head.headers["content-length"]) == len(got.content) > 0, path

    async def test_head_of_metrics_has_a_length(self, api: Served) -> None:
        head = await api.admin.head("/metrics")
        assert (head.status_code, int(head.headers["content-length"]) > 0) == (200, True)
        assert (await api.admin.head("/metrics/triton")).status_code == 404

    async def test_head_of_a_stream_does_not_wait_for_its_events(self, api: Served, wire: httpx.AsyncClient) -> None:
        api.engine.answers = [word(b"a", 1), 5.0, FINAL]
        started = await wire.post("/v1/streams", json={"pipeline": "write", "inputs": {"prompt": "x"}})
        head = await wire.head(started.headers["location"], timeout=2)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert head.headers["cache-control"] == "no-store, no-transform"
        assert (await wire.delete(started.headers["location"])).status_code == 204
        assert (await wire.head(started.headers["location"])).status_code == 404


async def test_answers_and_errors_have_cors_headers(api: Served) -> None:
    large = {"content": b"x", "headers": {"Content-Type": "application/json", "Content-Length": "9999999"}}
    prompt: dict[str, Any] = {"json": {"prompt": "x"}}
    answers: dict[int, Any] = {200: [word(b"a", 1), FINAL], 500: [ZeroDivisionError("secret")]}
    for method, path, status, sent in (
        ("GET", "/nothing", 404, {}),
        ("PUT", "/v1/pipelines/read", 405, {}),
        ("POST", "/v1/pipelines/read", 413, large),
        ("DELETE", "/v1/streams/unknown", 404, {}),
        ("POST", "/v1/pipelines/write", 200, prompt),
        ("POST", "/v1/pipelines/write/stream", 200, prompt),
        ("POST", "/v1/pipelines/write", 502, prompt),
        ("POST", "/v1/pipelines/write", 500, prompt),
        ("POST", "/v1/pipelines/write", 503, prompt),
    ):
        api.engine.answers = answers.get(status, [ModelError("no")])
        if status == 503:
            api.gateway.inference.workload.start_draining()
        headers = FROM_PAGE | sent.get("headers", {})
        answer = await api.client.request(method, path, **sent | {"headers": headers})
        assert (path, answer.status_code) == (path, status)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["vary"] == "Origin"
        exposed = "X-Request-ID, Server-Timing, X-Early-Exit, Retry-After, Location, X-Should-Retry, "
        exposed += "X-Session-Step, X-Session-Expires-In"
        assert answer.headers["access-control-expose-headers"] == exposed
        assert answer.headers["timing-allow-origin"] == ORIGIN
        assert status == 200 or answer.headers["x-request-id"] == answer.json()["request_id"]


@pytest.mark.parametrize("headers", [{}, {"Origin": "https://other.example"}])
async def test_other_origins_get_no_headers_but_vary(api: Served, headers: dict[str, str]) -> None:
    answer = await api.client.get("/v1/pipelines", headers=headers)
    names = ("access-control-allow-origin", "access-control-expose-headers", "timing-allow-origin")
    assert [answer.headers.get(name) for name in names] == [None, None, None]
    assert answer.headers["vary"] == "Origin"


class TestPreflight:
    async def asked(self, api: Served, names: str, method: str = "POST", origin: str = ORIGIN) -> set[str]:
        """Asks for ``names``, and returns those of the allowed headers, in lower case."""
        asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": names, "Origin": origin}
        answer = await api.client.options("/v1/chat/completions", headers=asked)
        assert (answer.status_code, answer.content) == (204, b"")
        allows = answer.headers.get("access-control-allow-origin")
        assert allows == (origin if origin == ORIGIN else None)
        assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
        assert answer.headers["vary"].startswith("Origin")
        return set(answer.headers["access-control-allow-headers"].lower().split(", ")) & set(names.split(","))

    @pytest.mark.parametrize(
        "names",
        [
            "authorization,content-type,last-event-id,traceparent,tracestate,x-api-key,x-explain,x-request-id",
            "idempotency-key,x-request-timeout",
            "authorization,content-type,user-agent",
            "baggage,sentry-trace,tracestate",
            "cache-control,pragma,x-requested-with",
            "openai-beta,openai-organization,openai-project",
            "x-stainless-arch,x-stainless-helper-method,x-stainless-lang,x-stainless-retry-count,x-stainless-of-tomorrow",
        ],
        ids=["documented", "documented too", "AI SDK in Firefox", "traces", "libraries", "OpenAI", "OpenAI's client"],
    )
    async def test_headers_of_the_gateway_and_of_libraries_are_allowed(self, api: Served, names: str) -> None:
        for method in ("GET", "HEAD", "POST", "DELETE"):
            assert (method, await self.asked(api, names, method)) == (method, set(names.split(",")))

    @pytest.mark.parametrize(
        ("names", "asked"),
        [
            ("authorization,x-tenant,my-x-stainless-lang", {}),
            ("authorization", {"method": "PUT"}),
            ("authorization", {"origin": "https://other.example"}),
        ],
    )
    async def test_another_header_method_or_origin_is_missing_in_the_lists(
        self, api: Served, names: str, asked: dict[str, str]
    ) -> None:
        """The answer is not an error, so that the browser says what is not allowed."""
        assert await self.asked(api, names, **asked) == {"authorization"}

    async def test_the_setting_allows_further_headers(self) -> None:
        async with scripted(cors_headers=("X-Tenant", "X-B3-TraceId")) as api:
            assert await self.asked(api, "x-b3-traceid,x-tenant,x-other") == {"x-b3-traceid", "x-tenant"}

    async def test_an_asterisk_allows_every_origin(self) -> None:
        async with scripted(origins=("*",)) as api:
            for origin in ("null", "https://a.example"):
                asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
                preflight = await api.client.options("/v1/pipelines/read", headers=asked)
                answer = await api.client.get("/v1/pipelines", headers={"Origin": origin})
                assert preflight.headers["access-control-allow-origin"] == "*"
                assert answer.headers["access-control-allow-origin"] == answer.headers["timing-allow-origin"] == "*"


async def test_every_page_and_file_has_security_headers(api: Served) -> None:
    for path in PAGES:
        answer = await api.client.get(path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
        assert "unsafe" not in answer.headers["content-security-policy"], path
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], path


async def test_range_is_ignored_and_an_unchanged_file_is_304(wire: httpx.AsyncClient) -> None:
    for path in ("/", "/console/console.js", "/docs", "/docs/assets/docs.js"):
        whole = await wire.get(path)
        for range_ in RANGES:
            answer = await wire.get(path, headers={"Range": range_, "If-Range": whole.headers["etag"]})
            assert (path, range_, answer.status_code) == (path, range_, 200)
            assert answer.content == whole.content, (path, range_)
            assert answer.headers["accept-ranges"] == "none", (path, range_)
            assert "content-range" not in answer.headers, (path, range_)
        answer = await wire.get(path, headers={"If-None-Match": whole.headers["etag"]})
        assert (path, answer.status_code, answer.content) == (path, 304, b"")


@pytest.mark.parametrize(
    ("port", "path", "hint"),
    [
        *(("client", each, "The admin port, 8081, serves the metrics.") for each in ("/metrics", "/metrics/triton")),
        *(
            ("admin", each, "The API, its documentation and the console are on port 8080.")
            for each in ("/docs", "/docs/errors", "/openapi.json", "/", "/v1/pipelines")
        ),
    ],
)
async def test_an_address_of_the_other_port_is_404(api: Served, port: str, path: str, hint: str) -> None:
    answer = await getattr(api, port).get(path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert answer.json()["hint"].endswith(hint)


FORM = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
guarded = scripted_fixture(rules=BrowserRules(frozenset(["gateway.example"]), frozenset([ORIGIN])))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example", ""]
)
async def test_a_foreign_host_is_refused_on_both_ports_and_runs_no_model(guarded: Served, host: str) -> None:
    for client, path in [(guarded.client, "/v1/pipelines"), (guarded.client, "/"), (guarded.admin, "/metrics")]:
        refused = await client.get(path, headers={"Host": host})
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
        assert "GATEWAY_ALLOWED_HOSTS" in refused.json()["hint"]
        assert refused.headers["x-request-id"] == refused.json()["request_id"]
    for path in ("/v1/pipelines/read", "/v1/pipelines/write/stream", "/v2/models/writer/infer", "/v1/completions"):
        refused = await guarded.client.post(path, json={"prompt": "x"}, headers={"Host": host})
        assert refused.status_code == 400
        assert "error" in refused.json() or refused.json()["code"] == "invalid_request"
    asked = {"Host": host, "Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    assert (await guarded.client.options("/v1/pipelines/read", headers=asked)).status_code == 400
    assert not guarded.engine.requests


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8080", "LocalHost.", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080", "[::1]"),
        *("gateway.example", "gateway.example:443", "gateway"),
    ],
)
async def test_loopback_listed_hosts_and_the_own_address_are_served(guarded: Served, host: str) -> None:
    """The transport of the tests connects to ``gateway``."""
    for client in (guarded.client, guarded.admin):
        assert (await client.get("/health/live", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("headers", [FORM, {"Sec-Fetch-Site": "cross-site"}], ids=["origin", "no origin"])
async def test_a_form_of_another_site_runs_no_model(guarded: Served, headers: dict[str, str]) -> None:
    for path in ("/v1/pipelines/read", "/v1/streams"):
        refused = await guarded.client.post(path, files={"image": b"x"}, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
        assert "GATEWAY_CORS_ORIGINS" in refused.json()["hint"]
    assert not guarded.engine.requests


@pytest.mark.parametrize(
    "headers", [*({"Sec-Fetch-Site": each} for each in ("same-origin", "same-site", "none")), FORM | FROM_PAGE]
)
async def test_pages_of_the_same_site_and_of_listed_origins_may_post(guarded: Served, headers: dict[str, str]) -> None:
    answer = await guarded.client.post("/v1/pipelines/read", files={"image": b"x"}, headers=headers)
    assert answer.json()["code"] == "invalid_input"
    assert answer.headers.get("access-control-allow-origin") == headers.get("Origin")


async def test_a_link_on_a_page_of_another_site_opens_the_console(guarded: Served) -> None:
    assert (await guarded.client.get("/", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 200


@pytest.mark.parametrize(
    ("variables", "serves", "refuses_forms"),
    [
        ({}, False, True),
        ({"HOST": "::1"}, False, True),
        ({"HOST": "localhost"}, False, True),
        ({"ALLOWED_HOSTS": "other.example, evil.example:8080"}, True, True),
        ({"CORS_ORIGINS": "*"}, False, False),
        ({"HOST": "0.0.0.0"}, True, False),
        ({"API_KEYS_FILE": "keys.yaml"}, True, False),
        ({"HOST": "0.0.0.0", "ALLOWED_HOSTS": "gateway.example"}, False, False),
        ({"API_KEYS_FILE": "keys.yaml", "ALLOWED_HOSTS": "gateway.example"}, False, False),
    ],
    ids=str,
)
async def test_the_settings_decide_which_requests_are_refused(
    variables: dict[str, str], serves: bool, refuses_forms: bool
) -> None:
    settings = read_settings({f"GATEWAY_{name}": value for name, value in variables.items()}, {})
    async with scripted(rules=browser_rules_of(settings)) as gateway:
        answer = await gateway.client.get("/health/live", headers={"Host": "evil.example"})
        assert (answer.status_code == 200) is serves
        form: httpx.Response = await gateway.client.post("/v1/pipelines/nothing", headers=FORM)
        assert (form.status_code == 400) is refuses_forms
