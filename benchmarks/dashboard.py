"""`python -m benchmarks dashboard`: draws the panels of the dashboard from a real Prometheus, under a mixed load.

The chart's dashboard is for Grafana, which the project does not install. This benchmark sends the queries of its panels
to Prometheus, as Grafana does, and draws the answers with matplotlib.
"""

import asyncio
import json
import math
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import yaml

from benchmarks.figure import Figure, Panel, panels
from benchmarks.peers.contents import BINARY, BLANK
from benchmarks.stage import ROOT, Stage, free_ports, process, stage

FILES = ROOT / "helm" / "triton-gateway" / "files"
ROUND_S = 2.0
"""Seconds of load for each round."""
VARIABLES = {"$job": "gateway", "$pipeline": ".*", "$__rate_interval": "10s"}
BYTES = {"Content-Type": "application/octet-stream"}
CROWD = 32
"""Callers in the second half that do not wait between their requests."""


@dataclass(frozen=True)
class Query:
    """A query of a panel. ``legend``: Grafana's template of a series' name."""

    expression: str
    legend: str


async def run(rounds: int) -> list[Figure]:
    """Sends requests for ``rounds`` times two seconds. Raises FileNotFoundError if Prometheus is not installed."""
    more = {"GATEWAY_SHARED_MEMORY_BYTES": str(64 * 2**20)}
    async with stage(more) as servers:
        with TemporaryDirectory(prefix="prometheus-") as folder:
            return [await _drawn(servers, Path(folder), rounds * ROUND_S)]


async def _drawn(servers: Stage, folder: Path, seconds: float) -> Figure:
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("prometheus is not installed: `make system-packages` installs it")
    (port,) = free_ports(1)
    targets = [urlsplit(url).netloc for url in (servers.gateway.admin_url, servers.triton.metrics_url)]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FILES / "rules.yaml", folder)
    options = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with process([program, *options, f"--web.listen-address=127.0.0.1:{port}"], {}, folder / "prometheus.log"):
        started = time.time()
        await _load(servers, seconds)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as prometheus:
            found = [await _panel(prometheus, title, queries, started) for title, queries in _queries().items()]
    return panels("The dashboard under a mixed load", "dashboard.svg", [each for each in found if each.series])


async def _load(servers: Stage, seconds: float) -> None:
    """Sends texts, images with and without text, and streams; in the second half more than the models can answer."""
    client, start = servers.gateway.client, time.monotonic()
    asks = [
        partial(client.post, "/v1/pipelines/insights", json={"text": "What a wonderful match!"}),
        partial(client.post, "/v1/pipelines/ocr", files={"image": BLANK}),
        partial(client.post, "/v1/pipelines/write", json={"prompt": "The for statement", "max_tokens": 32}),
        partial(client.post, "/v1/pipelines/write/stream", json={"prompt": "The for statement", "max_tokens": 32}),
        partial(client.post, "/v1/pipelines/bench_file", content=BINARY["1 MiB"], headers=BYTES),
        partial(client.post, "/v1/pipelines/insights", json={}),
    ]
    await asyncio.gather(
        *(_again(ask, 0.2, start + seconds) for ask in asks),
        *(_again(asks[1], 0.0, start + seconds, after_s=seconds / 2) for _ in range(CROWD)),
    )


async def _again(ask: Callable[[], Awaitable[object]], pause_s: float, ends: float, after_s: float = 0.0) -> None:
    """Sends the request again and again. Refused requests are part of the load."""
    await asyncio.sleep(after_s)
    while time.monotonic() < ends:
        await ask()
        await asyncio.sleep(pause_s)


def _queries() -> dict[str, list[Query]]:
    """Returns the queries of each panel, by its title."""
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    return {
        panel["title"]: [Query(_filled(target["expr"]), target["legendFormat"]) for target in panel["targets"]]
        for panel in dashboard["panels"]
        if panel["type"] == "timeseries"
    }


def _filled(expression: str) -> str:
    """Replaces the variables of the dashboard, as Grafana does."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


async def _panel(prometheus: httpx.AsyncClient, title: str, queries: Sequence[Query], started: float) -> Panel:
    series: dict[str, Sequence[tuple[float, float]]] = {}
    for query in queries:
        span: dict[str, str | float] = {"start": started, "end": time.time(), "step": "1s"}
        answer = await prometheus.get("/api/v1/query_range", params={"query": query.expression, **span})
        for each in answer.raise_for_status().json()["data"]["result"]:
            points = [(at - started, float(value)) for at, value in each["values"]]
            known = [point for point in points if not math.isnan(point[1])]
            if known:
                series[_name_of(query.legend, each["metric"])] = known
    return Panel(title, series)


def _name_of(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend)
