"""The graph of the console, an explained request with its waterfall, live numbers, findings and load."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess, live_gateway, running_gateway

HERE = Path(__file__).parent
GEOMETRY = (HERE / "geometry.js").read_text()
EXPLAINED: dict[str, Any] = json.loads((HERE / "explained.json").read_text())
INSIGHTS = ["insights", "insights_direct", "insights_topic", "insights_bls"]
REFERENCE = ["ocr", "ocr_bls", "write", *INSIGHTS, "embed", "listen", "ocr_steps", "write_steps", "insights_steps"]
WIDTHS = {"desktop": 1440, "phone": 390}


def synthetic(names: list[str], edges: list[tuple[str | None, str | None, str]], exits: list[str]) -> dict[str, Any]:
    tensor = {"datatype": "FP32", "shape": [-1, 4]}
    model = {"model": "m", "version": None, "backend": "python"}
    model |= {"decoupled": False, "max_batch_size": 8, "instances": 1}
    return {
        "steps": [{"name": name, **model, "inputs": [], "outputs": [], "calls": []} for name in names],
        "edges": [
            {"from": {"step": start, "tensor": name}, "to": {"step": end, "tensor": name}, "tensor": name, **tensor}
            for start, end, name in edges
        ],
        "exits": [{"step": name, "reason": "nothing_to_do"} for name in exits],
    }


def chain(count: int) -> dict[str, Any]:
    """A chain of steps with parallel tensors, where each third step also reads the request and writes the response."""
    names = [f"step_{index}" for index in range(count)]
    ends = [None, *names, None]
    edges = [(a, b, f"tensor_{side}") for a, b in pairwise(ends) for side in ("left", "right")]
    long = [edge for name in names[1::3] for edge in ((None, name, "original"), (name, None, f"seen_by_{name}"))]
    skips = [(a, b, "skipped") for a, b in zip(names, names[5:], strict=False)]
    return synthetic(names, [*edges, *long, *skips], names[::7])


def fan(count: int) -> dict[str, Any]:
    """Two steps that each pass a tensor to all of the next steps, with names of very different lengths."""
    heads = [f"head_{'long_name_' * (index % 4)}{index}" for index in range(count)]
    edges = [(None, "first", "in"), ("first", "second", "one")]
    edges += [(start, head, f"for_{head}") for head in heads for start in ("first", "second")]
    return synthetic(["first", "second", *heads], [*edges, *((head, None, head) for head in heads)], ["second"])


def conditions() -> dict[str, Any]:
    """Two steps under opposite conditions on a step whose tensors they do not read, and exits from step and request."""
    edges = [(None, "detect", "image"), ("detect", "crop", "boxes"), ("crop", "small", "x"), ("crop", "large", "x")]
    graph = synthetic(["detect", "crop", "small", "large"], [*edges, ("small", None, "s"), ("large", None, "l")], [])
    steps = {step["name"]: step for step in graph["steps"]}
    steps["small"]["when"] = {"below": ["detect.quality", 0.4]}
    steps["large"] |= {"when": {"not": {"below": ["detect.quality", 0.4]}}, "after": ["nothing"]}
    wanted = {"any_of": [{"equals": ["mode", "none"]}, {"any": {"in": ["languages", ["de", "en"]]}}]}
    graph["exits"] = [
        {"step": "detect", "reason": "no_boxes", "name": "nothing", "when": {"empty": "detect.boxes"}},
        {"step": None, "reason": "unwanted", "name": "unwanted", "when": wanted},
    ]
    return graph


def with_ensemble() -> dict[str, Any]:
    """A step whose model is an ensemble of two, under a condition on the first step and before the last one."""
    edges = [(None, "first", "a"), (None, "decode", "b"), ("decode", "net", "c"), (None, "last", "d")]
    graph = synthetic(["first", "decode", "net", "last"], [*edges, ("first", None, "x"), ("net", None, "y")], [])
    for each in graph["steps"][1:3]:
        each |= {"ensemble": "vision", "part_of": "see", "when": {"not_empty": "first.x"}}
    graph["steps"][3]["after"] = ["see"]
    return graph


def drawn(browser: Chrome, gateway: GatewayProcess, **request: Any) -> dict[str, Any]:
    """What ``geometry.js`` reports about the parts that it drew on the console's page."""
    browser.get(f"{gateway.url}/console/index.html")
    browser.get_log("browser")
    reply: dict[str, Any] = browser.execute_async_script(GEOMETRY, request)
    assert browser.get_log("browser") == []
    return reply


@pytest.mark.parametrize("device", WIDTHS)
def test_no_link_crosses_a_box_and_nothing_is_cropped(
    browser: Chrome, screen: Callable[[int], None], gateway: GatewayProcess, client: httpx.Client, device: str
) -> None:
    graphs = {name: client.get(f"/v1/pipelines/{name}").json()["graph"] for name in REFERENCE}
    graphs |= {"chain": chain(20), "fan": fan(9), "one": chain(1), "conditions": conditions()}
    graphs["with_ensemble"] = with_ensemble()
    screen(WIDTHS[device])
    found = drawn(browser, gateway, graphs=graphs)["graphs"]
    assert {name: report["faults"] for name, report in found.items()} == {name: [] for name in graphs}
    assert all(report["links"] > 0 for report in found.values())
    assert found["insights"]["boxes"] == 7
    assert found["conditions"]["conditions"] == [
        "if detect.quality < 0.4",
        "if not (detect.quality < 0.4)",
        "if boxes is empty",
        'if mode = "none" or any languages in ["de","en"…',
    ]
    assert found["conditions"]["order"] == ["step detect > step small", "step detect > step large"]
    assert found["with_ensemble"]["conditions"] == ["if first.x is not empty"] * 2
    assert found["with_ensemble"]["order"] == ["step first > step decode", "step net > step last"]


def test_a_step_and_a_link_show_what_they_are_by_keyboard(console: Callable[..., ConsolePage]) -> None:
    page = console("insights_bls")
    page.wait_for(".node[data-id='step insights_bls']")
    page.one(".node[data-id='step insights_bls']").send_keys(Keys.ENTER)
    page.wait_for(".details h2", "insights_bls")
    facts = dict(zip(page.texts(".details > .facts dt"), page.texts(".details > .facts dd"), strict=True))
    assert (facts["backend"], facts["version"], facts["largest batch"]) == ("python", "latest", "16")
    assert page.texts(".details summary") == ["calls text_embed", "calls head_topic", "calls head_sentiment"]
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.texts(".details") == []
    page.one(".link").send_keys(Keys.SPACE)
    page.wait_for(".details td", "TEXT")
    assert page.texts(".details tbody tr")[0] == "TEXT BYTES [1] TEXT TEXT"


def test_an_early_exit_is_a_dashed_way_out(console: Callable[..., ConsolePage]) -> None:
    page = console("ocr")
    page.wait_for(".node.exit", "no_text")
    line = page.one(".link.exit .line")
    assert (line.get_attribute("data-from"), line.get_attribute("data-to")) == ("step text_gate", "exit no_text")
    assert line.value_of_css_property("stroke-dasharray") != "none"


def test_steps_show_their_exits_and_conditions(console: Callable[..., ConsolePage]) -> None:
    page = console("ocr_steps")
    page.wait_for(".node.exit .condition", "if BOXES is empty")
    assert page.texts(".node.exit .condition") == ["if BOXES is empty", "if TEXTS is empty"]
    lines = page.browser.find_elements(By.CSS_SELECTOR, ".link.exit .line")
    ways = [(line.get_attribute("data-from"), line.get_attribute("data-to")) for line in lines]
    assert ways == [("step detect", "exit no_text"), ("step read", "exit no_readable_text")]
    page.one(".node[data-id='exit no_text']").send_keys(Keys.ENTER)
    page.wait_for(".details p", "reason no_text if detect.BOXES is empty. The answer is then 200")


def test_the_waterfalls_shares_add_up(browser: Chrome, gateway: GatewayProcess) -> None:
    steps = ["text_detect", "text_gate", "text_recognize"]
    graph = synthetic(steps, [(before, after, "tensor") for before, after in pairwise(steps)], [])
    for step in graph["steps"]:
        step["model"] = step["name"]
    shown = drawn(browser, gateway, explain={"answer": EXPLAINED, "graph": graph})["explain"]
    assert sum(shown["shares"].values()) == pytest.approx(EXPLAINED["total_ms"])
    assert shown["shares"] == pytest.approx(
        {"gateway": 1.0, "gateway-queue": 1.2, "network": 1.7, "queue": 3.4, "compute": 31.4, "other": 3.0}
    )
    assert shown["states"] == {"text_detect": "ok", "text_gate": "early_exit", "text_recognize": "not run"}
    assert shown["rows"] == [
        "ocr_ensemble ensemble 37.8 ms model ocr_ensemble, version 1 start 2.4 ms end 40.2 ms "
        "share of the request 91 %",
        "text_detect 34.0 ms model text_detect, version 1 start 2.6 ms end 36.6 ms queue 3.2 ms read input 0.20 ms "
        "compute 30.0 ms write output 0.10 ms waiting 0.50 ms share of the request 82 %",
        "text_gate early exit 1.5 ms model text_gate, version 1 start 38.2 ms end 39.7 ms queue 0.20 ms "
        "read input 0.10 ms compute 0.90 ms write output 0.10 ms waiting 0.20 ms share of the request 4 %",
    ]


def test_the_waterfall_shows_the_steps_of_the_gateway_and_those_that_were_skipped(
    browser: Chrome, gateway: GatewayProcess
) -> None:
    answer = EXPLAINED | {"spans": [], "steps": STEPS, "is_complete": False, "early_exit": "no_boxes"}
    shown = drawn(browser, gateway, explain={"answer": answer, "graph": conditions()})["explain"]
    assert sum(shown["shares"].values()) == pytest.approx(EXPLAINED["total_ms"])
    assert shown["states"] == {"detect": "ok", "crop": "cancelled", "small": "skipped", "large": "not run"}
    assert [row.split(" model ")[0].split(" start ")[0] for row in shown["rows"]] == [
        "detect 28.0 ms",
        "crop cancelled 8.0 ms",
        "nothing early exit 0.00 ms",
    ]
    assert shown["notRun"] == ["small skipped", "large not run"]


def test_without_spans_the_models_of_an_ensemble_have_the_state_of_their_step(
    browser: Chrome, gateway: GatewayProcess
) -> None:
    for outcome, state in (("ok", "ok"), ("skipped", "skipped")):
        times = {"start_ms": 2.0, "end_ms": 30.0, "total_ms": 28.0}
        steps = [{"name": "first", "outcome": "ok", **times}, {"name": "see", "outcome": outcome, **times}]
        answer = EXPLAINED | {"spans": [], "steps": steps, "is_complete": False, "early_exit": None}
        shown = drawn(browser, gateway, explain={"answer": answer, "graph": with_ensemble()})["explain"]
        assert shown["states"] == {"first": "ok", "decode": state, "net": state, "last": "not run"}
        assert shown["notRun"] == [*(["see skipped"] if outcome == "skipped" else []), "last not run"]


STEPS = [
    {"name": "detect", "outcome": "ok", "start_ms": 2.0, "end_ms": 30.0, "total_ms": 28.0},
    {"name": "small", "outcome": "skipped", "start_ms": 30.0, "end_ms": 30.0, "total_ms": 0.0},
    {"name": "crop", "outcome": "cancelled", "start_ms": 30.0, "end_ms": 38.0, "total_ms": 8.0},
    {"name": "unwanted", "outcome": "skipped", "start_ms": 38.0, "end_ms": 38.0, "total_ms": 0.0},
    {"name": "nothing", "outcome": "exit", "start_ms": 38.0, "end_ms": 38.0, "total_ms": 0.0},
]
"""Those of ``conditions()``, as the gateway explains them."""
OpenExplained = Callable[[str], ConsolePage]
SAMPLES = Path(__file__).parents[2] / "samples"
EXPLAIN_AS = """
const [explanation] = arguments;
const send = window.fetch;
window.fetch = (path, options) => {
  const [, id] = /^\\/v1\\/requests\\/(.+)\\/explain$/.exec(path) ?? [];
  return id ? Promise.resolve(Response.json({ ...explanation, request_id: id })) : send(path, options);
};
"""
"""The page receives this explanation for every request, because the test's Triton sends no spans."""


explaining = live_gateway(explain="true")  # its Triton sends no spans


@pytest.fixture
def open_explained(console: Callable[..., ConsolePage], explaining: GatewayProcess) -> OpenExplained:
    """``open_explained("embed")`` opens a pipeline whose requests will be explained."""

    def opened(pipeline: str) -> ConsolePage:
        page = console(pipeline, at=explaining.url)
        page.wait_for("#explain")
        page.click("#explain")
        return page

    return opened


def explained(page: ConsolePage, url: str) -> tuple[float, dict[str, Any]]:
    """The sum of the shown shares in milliseconds, and the explanation from the gateway."""
    page.wait_for(".waterfall h3")
    request_id = re.search(r"request (\S+)", page.one(".answer > .code").text)
    assert request_id is not None
    shown = page.browser.execute_script(
        "return [...document.querySelectorAll('.legend li')].reduce((sum, item) => sum + Number(item.dataset.ms), 0)"
    )
    return float(shown), httpx.get(f"{url}/v1/requests/{request_id[1]}/explain").json()


def test_an_explained_request_shows_its_phases(open_explained: OpenExplained, explaining: GatewayProcess) -> None:
    """Without spans only the gateway's phases are known."""
    page = open_explained("embed")
    page.click("#run")
    sum_ms, explanation = explained(page, explaining.url)
    assert sum_ms == pytest.approx(explanation["total_ms"])
    assert [row.split()[0] for row in page.texts(".waterfall .phase .name")] == ["read", "gateway's", "call", "write"]
    assert "Triton has sent no spans yet" in page.texts(".waterfall p")[-1]


def test_axe_finds_nothing(open_explained: OpenExplained, axe_in_both_schemes: Callable[[], list[list[str]]]) -> None:
    page = open_explained("ocr")
    page.browser.execute_script(EXPLAIN_AS, EXPLAINED)
    page.one("input[type=file]").send_keys(str(SAMPLES / "blank.png"))
    page.wait_for(".node[data-state=early_exit]")
    page.wait_for(".waterfall .not-run")
    for selected, title in ((".node[data-id='step text_detect']", "text_detect"), (".link", "request")):
        page.one(selected).send_keys(Keys.ENTER)
        page.wait_for(".details h2", title)
        assert axe_in_both_schemes() == []


def test_the_waterfall_has_a_time_axis_and_details(open_explained: OpenExplained) -> None:
    page = open_explained("ocr")
    page.browser.execute_script(EXPLAIN_AS, EXPLAINED)
    page.wait_for(".drop", "samples/sign.png")
    page.click("#run")
    page.wait_for(".axis", "0 ms")
    assert page.texts(".axis .track span") == ["0 ms", "10", "20", "30", "40"]
    page.click("[data-span=text_gate] summary")
    facts = dict(text.split("\n") for text in page.texts("[data-span=text_gate] .facts div"))
    assert (facts["model"], facts["start"], facts["end"]) == ("text_gate, version 1", "38.2 ms", "39.7 ms")
    assert (facts["queue"], facts["compute"], facts["share of the request"]) == ("0.20 ms", "0.90 ms", "4 %")
    page.click("[data-phase=read] summary")
    assert page.texts("[data-phase=read] .facts div")[-1].endswith("<1 %")
    assert page.texts("[data-phase=triton] .name") == ["call Triton"], "no other request shared the call"
    page.browser.execute_script(EXPLAIN_AS, {**EXPLAINED, "shared_with": 22})
    page.click("#run")
    page.wait_for("[data-phase=triton] .name", "call Triton in a batch of 23")


ASKED = "return performance.getEntriesByType('resource').filter((e) => e.name.includes('/v1/statistics')).length"
BOUNDS = [0.1, 1, 10]
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
        values = [
            [BOUNDS, before, [a + b for a, b in zip(before, counts, strict=True)], share] for counts, share, _ in cases
        ]
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


TOPS = """
const [values, done] = arguments;
import("/console/chart.js").then(({ topOf }) => done(values.map(topOf)));
"""
"""The scale of a chart ends at a round number."""


def open_section(page: ConsolePage, name: str) -> str:
    """Opens the page "Operation"; returns a selector of one of its sections."""
    page.click("#operation")
    page.wait_for(f"[data-section={name}]")
    return f"[data-section={name}]"


def severe(browser: Chrome) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def test_live_numbers_follow_the_requests(page: ConsolePage, development: GatewayProcess) -> None:
    for name in ("insights", "embed"):
        httpx.post(f"{development.url}/v1/pipelines/{name}", json={"text": "a match"}).raise_for_status()
    assert page.browser.execute_script(ASKED) == 0, "another page asks nothing"
    live = open_section(page, "traffic")
    page.wait_for(f"{live} .idle summary", "embed")
    row = f"{live} > .live-rows [data-row='insights unary']"
    assert page.texts(row) == []
    assert httpx.post(f"{development.url}/v1/pipelines/insights", json={"wrong": 1}).status_code == 422
    page.wait_for(f"{row} [data-live=errors]", "1")
    page.wait_for(f"{row} canvas")
    assert page.texts(f"{live} > .live-rows h3") == ["insights"]
    assert page.browser.execute_async_script(TOPS, [0, 0.03, 1, 3.4, 501]) == [1, 0.05, 1, 5, 1000]
    assert page.one(f"{row} [role=img]").get_attribute("aria-label").startswith("Requests a second of insights: now ")
    assert page.browser.execute_script(ASKED) > 0
    assert severe(page.browser) == []


def test_findings_name_pipeline_and_cause(
    page: ConsolePage, axe_in_both_schemes: Callable[[], list[list[str]]]
) -> None:
    findings = open_section(page, "check")
    page.wait_for(f"{findings} li[data-severity=error]", "'typo' is not a model in the repository")
    page.wait_for(f"{findings} li[data-severity=error] .small", "Correct the key in the line")
    page.wait_for(f"{findings} li[data-severity=model_not_ready] strong", "wrong")
    page.wait_for("[data-section=load] select")
    assert axe_in_both_schemes() == []
    assert severe(page.browser) == []


def test_load_sends_what_the_form_has_and_can_be_stopped(page: ConsolePage, development: GatewayProcess) -> None:
    counted = {"pipeline": "insights", "transport": "unary", "outcome": "ok"}
    before = development.metric("requests_total", **counted)
    load = open_section(page, "load")
    for name, much in (("requests", "1001"), ("at-once", "33")):
        usual = page.one(f"[name={name}]").get_property("value")
        page.fill(name, much)
        assert not page.browser.execute_script(f"return document.querySelector('[name={name}]').checkValidity()")
        page.fill(name, str(usual))
    page.fill("requests", "30")
    page.click(f"{load} button")
    page.wait_for(f"{load} [role=status]", "30 requests ended. 200: 30")
    page.wait_for(f"{load} figure rect")
    assert development.metric("requests_total", **counted) == before + 30
    page.fill("requests", "1000")
    page.click(f"{load} button")
    page.click(f"{load} button[type=button]")
    page.wait_for(f"{load} [role=status]", "Stopped after")


def test_invalid_json_is_shown_at_its_field_and_no_load_is_sent(page: ConsolePage, development: GatewayProcess) -> None:
    counted = {"pipeline": "with_json", "transport": "unary", "outcome": "ok"}
    form, link = "form[aria-label=Request]", "#pipelines a[href='#with_json']"
    page.open(development.url, "with_json")
    page.fill("script", '{"outputs": }')
    page.click("#run")
    page.wait_for(f"{form} .field-error", "This is not JSON")
    load = open_section(page, "load")
    page.click(f"{load} button")
    page.wait_for(f"{load} [role=alert]", "This is not JSON")
    assert development.metric("requests_total", **counted) == 0
    page.click(link)
    page.wait_for(form)
    page.fill("script", "{}")
    open_section(page, "load")
    page.fill("requests", "2")
    page.click(f"{load} button")
    page.wait_for(f"{load} [role=status]", "2 requests ended. 200: 2")
    assert development.metric("requests_total", **counted) == 2


def test_load_and_explanations_are_offered_only_where_they_are_allowed(console: Callable[..., ConsolePage]) -> None:
    page = console("insights")
    page.wait_for("#run")
    assert page.texts("#explain") == []
    open_section(page, "check")
    page.wait_for("[data-section=check] .findings[aria-busy=false]")
    assert page.texts("[data-section=load]") == []
