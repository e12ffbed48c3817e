"""The pod, its disruption budget, its scaling and its shutdown; the access to it; examples for LLM backends."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.settings import read_settings
from tests.helm.cross_checks import faults
from tests.helm.rendering import (
    CHART,
    ChartRefused,
    Document,
    environment_of,
    gateway_container,
    of_kind,
    pod_spec,
    render,
    render_text,
    the,
    triton_container,
)


def volume(documents: list[Document], name: str) -> Document:
    (found,) = (each for each in pod_spec(documents)["volumes"] if each["name"] == name)
    return dict(found)


def test_zero_gpus_removes_everything_about_gpus() -> None:
    documents = render({"triton": {"gpus": 0, "runtimeClassName": "nvidia", "entryPoint": ""}})
    assert "nvidia" not in str(pod_spec(documents))


def test_models_in_the_image_need_no_volume() -> None:
    documents = render()
    assert "--model-repository=/models" in triton_container(documents)["args"]
    assert [each["name"] for each in pod_spec(documents)["volumes"]] == ["gateway-tmp", "shm", "triton-tmp"]


def test_an_external_triton_removes_the_sidecar() -> None:
    documents = render(
        {"triton": {"enabled": False, "external": {"grpcUrl": "triton:8001"}}, "podMonitor": {"enabled": True}}
    )
    spec = pod_spec(documents)
    assert "initContainers" not in spec
    assert "nvidia" not in str(spec)
    assert [each["name"] for each in spec["volumes"]] == ["gateway-tmp"]
    assert [each["port"] for each in the(documents, "PodMonitor")["spec"]["podMetricsEndpoints"]] == ["admin"]


@pytest.mark.parametrize("number", [3, 4, "67%", "99%"])
def test_a_budget_that_blocks_every_drain_is_refused(number: int | str) -> None:
    with pytest.raises(ChartRefused, match="would block every drain of a node"):
        render({"replicaCount": 3, "podDisruptionBudget": {"minAvailable": number}})


def test_the_budget_is_compared_with_the_autoscalers_fewest_pods() -> None:
    budget = {"minAvailable": 2}
    with pytest.raises(ChartRefused, match="2 of 2 pods"):
        render({"replicaCount": 9, "autoscaling": {"enabled": True, "minReplicas": 2}, "podDisruptionBudget": budget})
    scaled = {"autoscaling": {"enabled": True, "minReplicas": 3}, "podDisruptionBudget": budget}
    assert the(render(scaled), "PodDisruptionBudget")["spec"]["minAvailable"] == 2


def test_the_autoscaler_counts_running_requests() -> None:
    documents = render({"autoscaling": {"enabled": True, "targetInFlight": 16}})
    spec = the(documents, "HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "triton_gateway_requests_under_way"
    assert metric["pods"]["target"]["averageValue"] == "16"
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert spec["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]
    assert "replicas" not in the(documents, "Deployment")["spec"]


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_keda_uses_the_same_numbers(monitor: str) -> None:
    scaling = {"enabled": True, "engine": "keda", "prometheusUrl": "http://prometheus:9090", "targetInFlight": 16}
    documents = render({"autoscaling": scaling, monitor: {"enabled": True, "intervalSeconds": 10}})
    assert of_kind(documents, "HorizontalPodAutoscaler") == []
    spec = the(documents, "ScaledObject")["spec"]
    (trigger,) = spec["triggers"]
    job = '{job="inference/demo-triton-gateway"}'
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": f"sum(triton_gateway_requests_running{job}) + sum(triton_gateway_requests_waiting{job})",
        "threshold": "16",
    }
    assert (trigger["metricType"], spec["pollingInterval"]) == ("AverageValue", 10)
    hpa = the(render({"autoscaling": {"enabled": True}}), "HorizontalPodAutoscaler")["spec"]
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert "replicas" not in the(documents, "Deployment")["spec"]


LLM_FILES = [CHART / "ci" / f"{name}-values.yaml" for name in ("vllm", "tensorrt-llm")]


@pytest.fixture(params=LLM_FILES, ids=lambda path: path.stem)
def of_llm(request: pytest.FixtureRequest) -> list[Document]:
    return render(request.param)


def mounts_of(container: Document) -> dict[str, Document]:
    return {each["mountPath"]: each for each in container["volumeMounts"]}


def volumes_of(documents: list[Document]) -> dict[str, Document]:
    return {each["name"]: each for each in pod_spec(documents)["volumes"]}


def test_triton_has_a_gpu_gibibytes_of_memory_and_half_an_hour_to_start(of_llm: list[Document]) -> None:
    triton = triton_container(of_llm)
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod_spec(of_llm)["runtimeClassName"] == "nvidia"
    volume = volumes_of(of_llm)[mounts_of(triton)["/dev/shm"]["name"]]
    assert (volume["emptyDir"]["medium"], volume["emptyDir"]["sizeLimit"][-2:]) == ("Memory", "Gi")
    assert int(volume["emptyDir"]["sizeLimit"][:-2]) >= 4
    assert triton["startupProbe"]["periodSeconds"] * triton["startupProbe"]["failureThreshold"] >= 1800
    assert "--disable-auto-complete-config" not in triton["args"], "config.pbtxt of vLLM usually names no tensors"


def test_both_containers_read_the_volume_of_models(of_llm: list[Document]) -> None:
    """Triton the repository, the gateway the folder of GATEWAY_TOKENIZERS."""
    tokenizers = environment_of(gateway_container(of_llm))["GATEWAY_TOKENIZERS"]
    repository = mounts_of(triton_container(of_llm))["/models"]
    folder = mounts_of(gateway_container(of_llm))[tokenizers]
    assert (folder["name"], folder["readOnly"], repository["readOnly"]) == (repository["name"], True, True)
    assert folder["subPath"] != repository["subPath"]
    assert "persistentVolumeClaim" in volumes_of(of_llm)[folder["name"]]


@pytest.mark.parametrize("path", LLM_FILES, ids=lambda path: path.stem)
def test_the_file_says_that_it_was_not_run(path: Path) -> None:
    assert "Not run on a GPU" in path.read_text().splitlines()[0]


seconds = {
    "delaySeconds": st.integers(1, 600),
    "longestStreamSeconds": st.integers(1, 86_400),
    "tritonExitSeconds": st.integers(1, 3_600),
    "marginSeconds": st.integers(10, 3_600),
}


def check_shutdown(shutdown: dict[str, int]) -> None:
    documents = render({"shutdown": shutdown})
    gateway, triton = gateway_container(documents), triton_container(documents)
    assert pod_spec(documents)["terminationGracePeriodSeconds"] == sum(shutdown.values())
    settings = read_settings(environment_of(gateway), {})
    assert (settings.shutdown_delay_s, settings.drain_s) == (shutdown["delaySeconds"], shutdown["longestStreamSeconds"])
    assert f"--exit-timeout-secs={shutdown['tritonExitSeconds']}" in triton["args"]
    assert faults(documents) == {}


@pytest.mark.parametrize("values", [(1, 1, 1, 10), (600, 86_400, 3_600, 3_600), (2, 30, 500, 70), (590, 9, 8, 11)])
def test_grace_period_drain_and_exit_timeout_agree(values: tuple[int, ...]) -> None:
    check_shutdown(dict(zip(seconds, values, strict=True)))


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(shutdown=st.fixed_dictionaries(seconds))
def test_any_grace_period_drain_and_exit_timeout_agree(shutdown: dict[str, int]) -> None:
    check_shutdown(shutdown)


HOSTS = {"ingress": {"enabled": True, "hosts": ["a.example", "b.example"]}}


def test_every_host_is_served_and_tls_is_optional() -> None:
    spec = the(render(HOSTS), "Ingress")["spec"]
    assert [rule["host"] for rule in spec["rules"]] == ["a.example", "b.example"]
    assert "tls" not in spec


AFFINE = {
    "sessionAffinity": True,
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
}


def test_session_affinity_is_a_cookie_behind_proxies_and_an_address_in_the_cluster() -> None:
    documents = render(HOSTS | AFFINE)
    said = the(documents, "Ingress")["metadata"]["annotations"]
    assert said["nginx.ingress.kubernetes.io/affinity"] == said["haproxy-ingress.github.io/affinity"] == "cookie"
    assert said["nginx.ingress.kubernetes.io/affinity-mode"] == "persistent"
    names = {said[key] for key in said if key.endswith(("/session-cookie-name", "/cookie-persistence"))}
    (rule,) = the(documents, "HTTPRoute")["spec"]["rules"]
    assert names == {rule["sessionPersistence"]["sessionName"]} == {"triton-gateway"}
    assert rule["sessionPersistence"]["type"] == "Cookie"
    assert the(documents, "Service")["spec"]["sessionAffinity"] == "ClientIP"


def test_without_session_affinity_requests_go_to_any_pod() -> None:
    text = render_text(HOSTS | AFFINE | {"sessionAffinity": False})
    assert "ffinity: c" not in text
    assert "cookie" not in text
    assert "sessionPersistence" not in text
    assert "ClientIP" not in text


def ingress_rules(values: Document) -> dict[int, list[Document] | None]:
    """The allowed clients by port; None means all."""
    policy = the(render(values), "NetworkPolicy")["spec"]
    return {port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]}


def test_only_monitoring_reaches_the_metrics() -> None:
    prometheus = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    rules = ingress_rules({"networkPolicy": {"monitoring": prometheus}})
    assert rules == {8080: None, 8081: prometheus, 8002: prometheus}


def test_only_named_clients_and_the_test_pod_reach_the_api() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"team": "web"}}}
    documents = render({"networkPolicy": {"clients": [peer]}})
    rules = the(documents, "NetworkPolicy")["spec"]["ingress"]
    allowed = next(rule["from"] for rule in rules if rule["ports"] == [{"port": 8080}])
    test_labels = the(documents, "Pod")["metadata"]["labels"]
    assert allowed == [peer, {"podSelector": {"matchLabels": test_labels}}]


@pytest.mark.parametrize(("tritons", "ports"), [("triton:9001", [9001]), ("a:9001,b:9001,c:9002", [9001, 9002])])
def test_restricted_egress_allows_dns_and_external_tritons(tritons: str, ports: list[int]) -> None:
    values = {
        "networkPolicy": {"restrictEgress": True},
        "triton": {"enabled": False, "external": {"grpcUrl": tritons}},
    }
    spec = the(render(values), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for rule in spec["egress"] for port in rule["ports"]] == [53, 53, *ports]
