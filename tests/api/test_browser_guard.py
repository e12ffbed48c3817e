"""Hosts and pages of other sites at a gateway without keys, on both ports."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.api.browser_rules import BrowserRules
from app.process.gateway import browser_rules_of
from app.settings import read_settings
from tests.api.conftest import scripted
from tests.toolkit.gateway import Served

PAGE = "https://page.example"
RULES = BrowserRules(frozenset(["gateway.example"]), frozenset([PAGE]))
FORM = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Served]:
    async with scripted(tmp_path, rules=RULES) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example", ""]
)
async def test_a_foreign_host_is_refused_on_both_ports(guarded: Served, host: str) -> None:
    for client, path in [(guarded.client, "/v1/pipelines"), (guarded.client, "/"), (guarded.admin, "/metrics")]:
        refused = await client.get(path, headers={"Host": host})
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
        assert "GATEWAY_ALLOWED_HOSTS" in refused.json()["hint"]
        assert refused.headers["x-request-id"] == refused.json()["request_id"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80"])
async def test_a_foreign_host_runs_no_model(guarded: Served, host: str) -> None:
    for path in ("/v1/pipelines/read", "/v1/pipelines/write/stream", "/v2/models/writer/infer", "/v1/completions"):
        refused = await guarded.client.post(path, json={"prompt": "x"}, headers={"Host": host})
        assert refused.status_code == 400
        assert "error" in refused.json() or refused.json()["code"] == "invalid_request"
    asked = {"Host": host, "Origin": PAGE, "Access-Control-Request-Method": "POST"}
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


@pytest.mark.parametrize("site", ["same-origin", "same-site", "none"])
async def test_pages_of_the_same_site_may_post(guarded: Served, site: str) -> None:
    answer = await guarded.client.post("/v1/pipelines/read", files={"image": b"x"}, headers={"Sec-Fetch-Site": site})
    assert (answer.status_code, answer.json().get("code")) != (400, "invalid_request")


async def test_a_page_of_a_listed_origin_may_post(guarded: Served) -> None:
    headers = FORM | {"Origin": PAGE}
    answer = await guarded.client.post("/v1/pipelines/read", files={"image": b"x"}, headers=headers)
    assert answer.json().get("code") != "invalid_request"
    assert answer.headers["access-control-allow-origin"] == PAGE


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
    variables: dict[str, str], serves: bool, refuses_forms: bool, tmp_path: Path
) -> None:
    settings = read_settings({f"GATEWAY_{name}": value for name, value in variables.items()}, {})
    async with scripted(tmp_path, rules=browser_rules_of(settings)) as gateway:
        answer = await gateway.client.get("/health/live", headers={"Host": "evil.example"})
        assert (answer.status_code == 200) is serves
        form: httpx.Response = await gateway.client.post("/v1/pipelines/nothing", headers=FORM)
        assert (form.status_code == 400) is refuses_forms
