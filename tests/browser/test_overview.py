"""The live numbers, the findings and the load of the console, in a real Chromium against a real Triton."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess, running_gateway

ASKED = "return performance.getEntriesByType('resource').filter((e) => e.name.includes('/v1/statistics')).length"
BOUNDS = [0.1, 1, 10]
FIRST_TAB = ".tabs [role=tab]"
PIPELINE = {"stream": {"outcomes": {}, "durations": [0] * 4}, "in_flight": 0, "active_streams": 0, "waiting": 0}
WRONG = {"model": "typo", "outputs": {"text": {"tensor": "TEXT"}}, "readiness": "optional"}
WITH_JSON = {
    "model": "scripted",
    "inputs": {"script": {"tensor": "SCRIPT", "kind": "json"}},
    "outputs": {"text": {"tensor": "TEXT", "kind": "text"}},
}


def module(browser: Chrome, script: str, *values: object) -> Any:
    """The result of an expression over ``m``, the module of the statistics, and ``v``, the values."""
    code = (
        "const [v, done] = arguments;"
        f"import('/console/statistics.js').then((m) => done({script}), (error) => done(String(error)));"
    )
    return browser.execute_async_script(code, list(values))


def answer(time_s: float, outcomes: dict[str, int], durations: list[int]) -> dict[str, Any]:
    unary = {"outcomes": outcomes, "durations": durations}
    return {"time_s": time_s, "bounds_s": BOUNDS, "pipelines": {"p": {**PIPELINE, "unary": unary}}}


def plus(before: list[int], counts: list[int]) -> list[int]:
    return [a + b for a, b in zip(before, counts, strict=True)]


class TestDifferences:
    @pytest.fixture
    def browser(self, browser: Chrome, gateway: GatewayProcess) -> Chrome:
        browser.get(f"{gateway.url}/docs/errors")
        return browser

    def test_percentiles_lie_within_a_bucket(self, browser: Chrome) -> None:
        before = [1, 2, 3, 4]
        cases = [
            ([10, 10, 10, 10], 0.5, 0.05),
            ([0, 10, 10, 10], 0.5, 0.55),
            ([5, 10, 10, 10], 0.95, 0.91),
            ([0, 0, 0, 3], 0.5, 10),
        ]
        values = [[BOUNDS, before, plus(before, counts), share] for counts, share, _ in cases]
        found = module(browser, "v.map((each) => m.percentile(...each))", *values)
        assert found == pytest.approx([expected for *_, expected in cases])
        assert module(browser, "m.percentile(...v)", BOUNDS, before, before, 0.5) is None

    def test_rates_are_differences_by_time(self, browser: Chrome) -> None:
        polls = [
            answer(100, {"ok": 5}, [5, 5, 5, 5]),
            answer(102, {"ok": 9}, [9, 9, 9, 9]),
            answer(104, {"ok": 10, "early_exit": 1, "timeout": 2}, [11, 11, 11, 11]),
        ]
        script = "(() => { const h = new m.History(9); v.forEach((a) => h.add(a)); return [h.times, h.rows]; })()"
        times, [row] = module(browser, script, *polls)
        assert times == [-2, 0]
        assert (row["rate"], row["exits"], row["errors"]) == ([2, 2], [0, 0.5], [0, 1])
        assert row["outcomes"] == {"ok": 5, "early_exit": 1, "timeout": 2}

    def test_a_restart_of_the_gateway_starts_again(self, browser: Chrome) -> None:
        polls = [answer(100, {"ok": 50}, [50] * 4), answer(102, {"ok": 1}, [1] * 4), answer(104, {"ok": 3}, [3] * 4)]
        script = "(() => { const h = new m.History(9); v.forEach((a) => h.add(a)); return h.rows[0].rate; })()"
        assert module(browser, script, *polls) == [1]


@pytest.fixture(scope="module")
def development(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that offers load, with a pipeline whose model does not exist, and one with a field for JSON."""
    folder = tmp_path_factory.mktemp("development")
    config = config_path.with_name("with_fault.yaml")
    declared = yaml.safe_load(config_path.read_text())
    pipelines = {**declared["pipelines"], "wrong": WRONG, "with_json": WITH_JSON}
    config.write_text(json.dumps({**declared, "pipelines": pipelines}))
    with running_gateway(
        folder / "gateway", triton_url=triton.grpc_url, config=str(config), console_load="true"
    ) as process:
        yield process


@pytest.fixture
def page(browser: Chrome, development: GatewayProcess) -> ConsolePage:
    page = ConsolePage(browser)
    page.open(development.url, "insights")
    return page


def open_section(page: ConsolePage, name: str) -> str:
    """Opens the last tab; returns a selector of one of its sections."""
    page.click(".tabs [role=tab]:last-child")
    page.wait_for(f"[data-section={name}]")
    return f"[data-section={name}]"


def severe(browser: Chrome) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def test_live_numbers_follow_the_requests(page: ConsolePage, development: GatewayProcess) -> None:
    body = {"text": "a match"}
    httpx.post(f"{development.url}/v1/pipelines/insights", json=body).raise_for_status()
    assert page.browser.execute_script(ASKED) == 0, "a hidden tab asks nothing"
    live = open_section(page, "traffic")
    row = f"{live} [data-row='insights unary']"
    page.wait_for(row)
    assert httpx.post(f"{development.url}/v1/pipelines/insights", json={"wrong": 1}).status_code == 422
    page.wait_for(f"{row} [data-live=errors]", "1")
    page.wait_for(f"{row} canvas")
    assert page.one(f"{row} [role=img]").get_attribute("aria-label").startswith("Requests a second of insights: now ")
    assert page.browser.execute_script(ASKED) > 0
    assert severe(page.browser) == []


def test_findings_name_pipeline_and_cause(page: ConsolePage) -> None:
    findings = open_section(page, "check")
    page.wait_for(f"{findings} li[data-severity=error]", "'typo' is not a model in the repository")
    page.wait_for(f"{findings} li[data-severity=error] .small", "Correct the key in the line")
    page.wait_for(f"{findings} li[data-severity=model_not_ready] strong", "wrong")
    assert severe(page.browser) == []


def test_load_sends_what_the_form_has_and_can_be_stopped(page: ConsolePage, development: GatewayProcess) -> None:
    counted = {"pipeline": "insights", "transport": "unary", "outcome": "ok"}
    before = development.metric("requests_total", **counted)
    load = open_section(page, "load")
    check_too_much_is_refused(page)
    page.fill("requests", "30")
    page.click(f"{load} button")
    page.wait_for(f"{load} [role=status]", "30 requests ended. 200: 30")
    page.wait_for(f"{load} figure rect")
    assert development.metric("requests_total", **counted) == before + 30
    page.fill("requests", "1000")
    page.click(f"{load} button")
    page.click(f"{load} button[type=button]")
    page.wait_for(f"{load} [role=status]", "Stopped after")


def check_too_much_is_refused(page: ConsolePage) -> None:
    """By the form itself."""
    for name, much in (("requests", "1001"), ("at-once", "33")):
        usual = page.one(f"[name={name}]").get_property("value")
        page.fill(name, much)
        assert not page.browser.execute_script(f"return document.querySelector('[name={name}]').checkValidity()")
        page.fill(name, str(usual))


def test_invalid_json_is_shown_at_its_field_and_no_load_is_sent(page: ConsolePage, development: GatewayProcess) -> None:
    sent = "return performance.getEntriesByName(location.origin + '/v1/pipelines/with_json').length"
    page.open(development.url, "with_json")
    load = open_section(page, "load")
    before = page.browser.execute_script(sent)
    page.click(FIRST_TAB)
    page.fill("script", '{"outputs": }')
    open_section(page, "load")
    page.click(f"{load} button")
    page.wait_for(f"{load} [role=alert]", "This is not JSON")
    page.wait_for("form[aria-label=Request] .field-error", "This is not JSON")
    assert page.browser.execute_script(sent) == before
    page.click(FIRST_TAB)
    page.fill("script", "{}")
    open_section(page, "load")
    page.fill("requests", "2")
    page.click(f"{load} button")
    page.wait_for(f"{load} [role=status]", "2 requests ended.")
    assert page.browser.execute_script(sent) == before + 2


def test_load_is_not_offered_in_production(console: Callable[..., ConsolePage]) -> None:
    page = console("insights")
    open_section(page, "check")
    page.wait_for("[data-section=check] .findings[aria-busy=false]")
    assert page.texts("[data-section=load]") == []
