"""Streams with fetch and EventSource in a real Chromium, also from another origin."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.processes import GatewayProcess, running_gateway

ASK = """
const [url, done] = arguments;
fetch(url).then((response) => done({status: response.status}), (error) => done({error: String(error)}));
"""

LISTEN = """
const [url, body, done] = arguments;
(async () => {
  const headers = {"Content-Type": "application/json"};
  const started = await fetch(url + "/v1/streams", {method: "POST", headers, body: JSON.stringify(body)});
  const location = started.headers.get("Location");
  const source = new EventSource(url + location);
  const events = [];
  for (const name of ["output", "done", "error"]) {
    source.addEventListener(name, (event) => {
      if (event.data !== undefined) events.push([event.lastEventId, name, JSON.parse(event.data)]);
      else if (source.readyState === EventSource.CLOSED) done({status: started.status, location, events});
    });
  }
})().catch((error) => done({error: String(error)}));
"""
"""Never closes its EventSource: it ends with status 204 from the gateway."""

WRITE = {"prompt": "The for statement", "max_tokens": 60, "seed": 7}


@pytest.fixture(scope="module")
def open_gateway(
    triton: EmbeddedTriton, config_path: Path, other_origin: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that allows calls from the other origin."""
    settings = {"triton_url": triton.grpc_url, "config": str(config_path), "cors_origins": other_origin, "drain_s": "1"}
    with running_gateway(tmp_path_factory.mktemp("open"), **settings) as process:
        yield process


def run_script(browser: Chrome, script: str, *arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = browser.execute_async_script(script, *arguments)
    return answer


def test_event_source_stops_after_the_end(browser: Chrome, open_gateway: GatewayProcess, other_origin: str) -> None:
    browser.get(other_origin)
    answer = run_script(browser, LISTEN, open_gateway.url, {"pipeline": "write", "inputs": WRITE})
    assert answer["status"] == 201
    events = answer["events"]
    assert [int(id_) for id_, _, _ in events] == list(range(1, len(events) + 1))
    assert [name for _, name, _ in events] == ["output"] * (len(events) - 1) + ["done"]
    text = "".join(data["text"] for _, _, data in events[:-1])
    assert text == httpx.post(f"{open_gateway.url}/v1/pipelines/write", json=WRITE, timeout=30).json()["text"]


def test_an_origin_that_is_not_listed_is_blocked(browser: Chrome, gateway: GatewayProcess, other_origin: str) -> None:
    browser.get(other_origin)
    answer = run_script(browser, ASK, f"{gateway.url}/v1/pipelines")
    assert answer == {"error": "TypeError: Failed to fetch"}
