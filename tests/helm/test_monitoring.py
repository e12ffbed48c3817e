"""The rules and the dashboard of a release."""

import json

import yaml
from prometheus_client import generate_latest

from app.observability.metrics import Metrics
from tests.helm.checks import custom_faults
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Document, gateway_container, of_kind, render, the

MONITORED = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
JOB = f'job="{NAMESPACE}/{RELEASE}-triton-gateway"'


def test_the_rules_of_a_release_are_about_its_own_job() -> None:
    """The Prometheus operator names a PodMonitor's job namespace/name."""
    documents = render(MONITORED)
    assert the(documents, "PodMonitor")["metadata"]["name"] == f"{RELEASE}-triton-gateway"
    rules = the(documents, "PrometheusRule")["spec"]
    theirs, ours = queries(yaml.safe_load((CHART / "files" / "rules.yaml").read_text())), queries(rules)
    assert ours == [query.replace('job="gateway"', JOB) for query in theirs]
    assert ours != theirs
    assert [query for query in theirs if query.count("{") != query.count('{job="gateway"')] == []


def queries(rules: Document) -> list[str]:
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_a_service_monitor_has_the_targets_and_the_job_of_a_pod_monitor() -> None:
    scraped = {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "intervalSeconds": 30}}
    documents = render({**scraped, "prometheusRule": {"enabled": True}})
    monitor = the(documents, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    endpoints = monitor["spec"]["endpoints"]
    assert [(each["port"], each["interval"]) for each in endpoints] == [("admin", "30s"), ("triton-metrics", "30s")]
    jobs = {relabeling["replacement"] for each in endpoints for relabeling in each["relabelings"]}
    assert {f'job="{job}"' for job in jobs} == {JOB}
    assert the(documents, "PrometheusRule")["spec"] == the(render(MONITORED), "PrometheusRule")["spec"]
    service = next(each for each in of_kind(documents, "Service") if each["metadata"]["name"].endswith("-metrics"))
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [(each["name"], each["targetPort"]) for each in service["spec"]["ports"]] == [
        ("admin", "admin"),
        ("triton-metrics", "triton-metrics"),
    ]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "pods that load or drain would have no metrics"


def test_a_service_monitor_without_a_sidecar_asks_the_gateway_only() -> None:
    external = {"enabled": False, "external": {"grpcUrl": "triton:8001"}}
    documents = render({"serviceMonitor": {"enabled": True}, "triton": external})
    assert [each["port"] for each in the(documents, "ServiceMonitor")["spec"]["endpoints"]] == ["admin"]
    service = next(each for each in of_kind(documents, "Service") if each["metadata"]["name"].endswith("-metrics"))
    assert [each["targetPort"] for each in service["spec"]["ports"]] == ["admin"]


def test_the_dashboard_is_json_with_the_label_of_grafana() -> None:
    config_map = the(render({"dashboard": {"enabled": True}}), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["triton-gateway.json"])["uid"] == "triton-gateway"


def test_every_panel_has_a_description_a_unit_and_its_own_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]:
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not cells & taken
        assert x + width <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_the_endpoint_picker_reads_gauges_of_the_gateway() -> None:
    documents = render(CHART / "ci" / "endpoint-picker-values.yaml")
    config_map = next(
        each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == "inference-picker"
    )
    config = yaml.safe_load(config_map["data"]["config.yaml"])
    assert list(custom_faults(config)) == []
    plugins = {each["type"]: each for each in config["plugins"]}
    plugin = plugins["core-metrics-extractor"]
    (engine,) = plugin["parameters"]["engineConfigs"]
    assert plugin["parameters"]["defaultEngine"] == engine["name"]
    pod_labels = the(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pod_labels[plugin["parameters"]["engineLabelKey"]] == engine["name"]
    page = generate_latest(Metrics("0").registry).decode().splitlines()
    assert {f"{engine['queuedRequestsSpec']} 0.0", f"{engine['runningRequestsSpec']} 0.0"} <= set(page)
    (port,) = the(documents, "InferencePool")["spec"]["targetPorts"]
    assert port["number"] == next(
        each["containerPort"] for each in gateway_container(documents)["ports"] if each["name"] == "http"
    )


def test_every_plugin_of_the_endpoint_picker_is_used_once() -> None:
    """Without a scorer, the picker chooses a pod at random."""
    documents = render(CHART / "ci" / "endpoint-picker-values.yaml")
    (text,) = (each["data"]["config.yaml"] for each in of_kind(documents, "ConfigMap") if "config.yaml" in each["data"])
    config = yaml.safe_load(text)
    used = [each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]]
    for source in config["dataLayer"]["sources"]:
        used += [source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])]
    assert sorted(used) == sorted(each["type"] for each in config["plugins"])
    assert {"queue-scorer", "running-requests-size-scorer"} <= set(used)


def test_the_adapter_rule_provides_the_autoscalers_metric() -> None:
    adapter = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    (metric,) = the(render({"autoscaling": {"enabled": True}}), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
