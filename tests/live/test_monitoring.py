"""A real Prometheus scrapes the gateway and Triton, and answers every query of the rules and the dashboard."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.helm.rendering import render, the
from tests.toolkit.processes import GatewayProcess, free_ports
from tests.toolkit.programs import running_program
from tests.toolkit.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
FILES = ROOT / "helm" / "triton-gateway" / "files"
START_S = 60.0
METRIC = re.compile(r"\b(triton_gateway_\w+|nv_\w+|process_\w+)\b")

GPU_METRICS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}
"""Triton without a GPU does not export these metrics. Source: Triton's user guide, "Metrics", table of GPU metrics."""

SILENT_PANELS = {"GPU at work", "GPU memory", "Refused for load", "Ejected Tritons"}
SILENT_PANELS |= {"Shared memory", "Calls with large tensors"}
"""Panels without data in this test: no GPU, no refused request, only one Triton, no shared memory."""

SILENT_LABELS = {"address", "state", "way"}
"""Labels that only the metrics of these panels have."""


@cache
def queries() -> dict[str, str]:
    """Returns the queries of the rules (by alert or record), the dashboard (by panel and legend) and autoscalers."""
    rules = {
        rule.get("alert", rule.get("record")): rule["expr"]
        for group in yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    }
    (adapter,) = yaml.safe_load((FILES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    scaling = adapter["metricsQuery"].replace("<<.GroupBy>>", "instance").replace("<<.LabelMatchers>>", 'job="gateway"')
    values = {"enabled": True, "engine": "keda", "prometheusUrl": "http://prometheus"}
    scaled = the(render({"autoscaling": values, "podMonitor": {"enabled": True}}), "ScaledObject")
    keda = scaled["spec"]["triggers"][0]["metadata"]["query"].replace("inference/demo-triton-gateway", "gateway")
    return rules | panel_queries() | {"triton_gateway_requests_under_way": scaling, "KEDA": keda}


def panel_queries() -> dict[str, str]:
    """Replaces the variables of the dashboard, as Grafana does."""
    text = (FILES / "dashboard.json").read_text()
    for variable, value in {"$job": "gateway", "$pipeline": ".*", "$__rate_interval": "30s"}.items():
        text = text.replace(variable, value)
    return {
        f"{panel['title']} / {target['legendFormat']}": target["expr"]
        for panel in json.loads(text)["panels"]
        for target in panel.get("targets", [])
    }


class Prometheus:
    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self._client = client

    def answer(self, query: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.get(f"{self.url}/api/v1/query", params={"query": query}).json()
        return answer

    def query(self, query: str) -> list[dict[str, Any]]:
        answer = self.answer(query)
        assert answer["status"] == "success", (query, answer)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def is_ready(self) -> bool:
        """Whether it has loaded its data. It listens before, and answers 503."""
        with suppress(httpx.TransportError):
            return self._client.get(f"{self.url}/-/ready").is_success
        return False

    def scraped(self) -> float:
        """Returns the number of successful scrapes of each target (the lower number), or 0 until both succeed."""
        counts = [float(each["value"][1]) for each in self.query("count_over_time(up[1h]) and up == 1")]
        return min(counts) if len(counts) == 2 else 0.0


@pytest.fixture(scope="module")
def prometheus(
    triton: EmbeddedTriton, gateway: GatewayProcess, require: Require, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Starts Prometheus with the configuration and the rules of the repository, but other addresses and intervals."""
    program = shutil.which("prometheus")
    require(program, "Prometheus is not installed: `make system-packages` installs it")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    targets = [url.split("/")[2] for url in (gateway.admin_url, str(triton.metrics_url))]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FILES / "rules.yaml", folder)
    (port,) = free_ports(1)
    options = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    command = [str(program), *options, f"--web.listen-address=127.0.0.1:{port}"]
    with httpx.Client(timeout=PATIENCE_S) as client:
        started = Prometheus(f"http://127.0.0.1:{port}", client)
        with running_program(command, folder / "log", started.is_ready):
            eventually(lambda: started.scraped() >= 1, START_S)
            yield started


@pytest.fixture(scope="module")
def after_traffic(prometheus: Prometheus, client: httpx.Client) -> Prometheus:
    """Sends requests with each outcome: an answer, an early exit, a stream, an error, a contract violation."""
    sign, blank = ((ROOT / "samples" / f"{name}.png").read_bytes() for name in ("sign", "blank"))
    for _ in range(2):
        for image in (sign, blank):
            client.post("/v1/pipelines/ocr", files={"image": image}).raise_for_status()
        client.post("/v1/pipelines/write/stream", json={"prompt": "The", "max_tokens": 8}).raise_for_status()
        client.post("/v1/pipelines/write", json={"prompt": 1})
        client.post("/v1/pipelines/scripted", json={"script": json.dumps({"omit": ["TEXT"]})})
        wanted = prometheus.scraped() + 2  # the next scrape may have begun before the requests
        eventually(lambda wanted=wanted: prometheus.scraped() >= wanted, START_S)  # type: ignore[misc]
    return prometheus


def test_every_query_is_valid_and_every_metric_of_it_is_exported(
    after_traffic: Prometheus, gateway: GatewayProcess, require: Require
) -> None:
    """A metric is exported if it has samples, or if the page declares it without samples."""
    answers = {name: after_traffic.answer(query) for name, query in queries().items()}
    assert {name: answer for name, answer in answers.items() if answer["status"] != "success"} == {}
    exported = {each["metric"]["__name__"] for each in after_traffic.query('{job="gateway"}')}
    page = httpx.get(f"{gateway.admin_url}/metrics")
    exported |= set(re.findall(r"^# TYPE (\w+) ", page.text, re.MULTILINE))
    queried = {name for query in queries().values() for name in METRIC.findall(query)} - METRIC_PATTERNS
    assert queried - exported == GPU_METRICS
    assert page.headers["content-type"].startswith("text/plain")
    promtool = shutil.which("promtool")
    require(promtool, "promtool is not installed: `make system-packages` installs it")
    checked = subprocess.run([str(promtool), "check", "metrics"], input=page.content, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


METRIC_PATTERNS = {"triton_gateway_"}
"""The prefix of a regular expression over names. Other panels check each of these names."""


def test_every_label_of_a_query_is_exported(after_traffic: Prometheus) -> None:
    labels = {label for each in after_traffic.query('{job="gateway"}') for label in each["metric"]}
    queried = set()
    for query in queries().values():
        queried |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        queried |= set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", query))
    added_by_kubernetes = {"namespace"}
    assert queried - labels - SILENT_LABELS - {"__name__"} == added_by_kubernetes


def test_every_panel_has_data(after_traffic: Prometheus) -> None:
    expected = {name: query for name, query in panel_queries().items() if name.split(" / ")[0] not in SILENT_PANELS}
    assert expected
    assert [name for name, query in expected.items() if after_traffic.query(query) == []] == []


def test_the_autoscaler_sees_0_requests_of_an_idle_pod(prometheus: Prometheus) -> None:
    for name in ("triton_gateway_requests_under_way", "KEDA"):
        assert [each["value"][1] for each in prometheus.query(queries()[name])] == ["0"], name
