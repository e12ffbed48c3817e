"""The graph of the console, and an explained request: its phases, its waterfall and the marks on the graph."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess, running_gateway

HERE = Path(__file__).parent
GEOMETRY = (HERE / "geometry.js").read_text()
EXPLAINED: dict[str, Any] = json.loads((HERE / "explained.json").read_text())
INSIGHTS = ["insights", "insights_direct", "insights_topic", "insights_bls"]
REFERENCE = ["ocr", "ocr_bls", "write", *INSIGHTS, "embed", "listen"]
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


@pytest.fixture
def sized(browser: Chrome) -> Any:
    def sized(width: int) -> None:
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    yield sized
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def drawn(browser: Chrome, gateway: GatewayProcess, **request: Any) -> dict[str, Any]:
    """What ``geometry.js`` reports about the parts that it drew on the console's page."""
    browser.get(f"{gateway.url}/console/index.html")
    browser.get_log("browser")
    reply: dict[str, Any] = browser.execute_async_script(GEOMETRY, request)
    assert browser.get_log("browser") == []
    return reply


@pytest.mark.parametrize("device", WIDTHS)
def test_no_link_crosses_a_box_and_nothing_is_cropped(
    browser: Chrome, sized: Callable[[int], None], gateway: GatewayProcess, client: httpx.Client, device: str
) -> None:
    graphs = {name: client.get(f"/v1/pipelines/{name}").json()["graph"] for name in REFERENCE}
    graphs |= {"chain": chain(20), "fan": fan(9), "one": chain(1)}
    sized(WIDTHS[device])
    found = drawn(browser, gateway, graphs=graphs)["graphs"]
    assert {name: report["faults"] for name, report in found.items()} == {name: [] for name in graphs}
    assert all(report["links"] > 0 for report in found.values())
    assert found["insights"]["boxes"] == 7


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


def test_only_who_may_explain_is_offered_it(console: Callable[..., ConsolePage]) -> None:
    page = console("embed")
    page.wait_for("#run")
    assert page.texts("#explain") == []


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


@pytest.fixture(scope="module")
def explaining(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that explains requests. Its Triton sends no spans."""
    settings = {"triton_url": triton.grpc_url, "config": str(config_path), "explain": "true"}
    with running_gateway(tmp_path_factory.mktemp("explaining"), **settings) as process:
        yield process


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
