"""The pod: the sidecar, GPUs, sources of models, strategy, disruption budget, shutdown; examples for LLM backends."""

from pathlib import Path
from typing import ClassVar

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
    the,
    triton_container,
)


def volume(documents: list[Document], name: str) -> Document:
    (found,) = (each for each in pod_spec(documents)["volumes"] if each["name"] == name)
    return dict(found)


def test_only_the_metrics_of_triton_leave_loopback() -> None:
    addresses = {word for word in triton_container(render())["args"] if "-address=" in word}
    assert addresses == {"--grpc-address=127.0.0.1", "--http-address=127.0.0.1", "--metrics-address=0.0.0.0"}
    assert [port["containerPort"] for port in triton_container(render())["ports"]] == [8002]


def test_only_the_gateway_has_a_readiness_probe() -> None:
    documents = render()
    assert "readinessProbe" not in triton_container(documents)
    assert gateway_container(documents)["readinessProbe"]["httpGet"]["path"] == "/health/ready"


class TestLargeTensors:
    """One value turns on shared memory for large tensors."""

    ON: ClassVar[Document] = {"triton": {"sharedMemory": {"bytes": 268_435_456}}}

    def test_gateway_and_triton_mount_the_same_memory(self) -> None:
        documents = render(self.ON)
        containers = gateway_container(documents), triton_container(documents)
        mounted = [{m["mountPath"]: m["name"] for m in each["volumeMounts"]}["/dev/shm"] for each in containers]
        assert mounted == ["shm", "shm"]
        assert volume(documents, "shm")["emptyDir"]["medium"] == "Memory"
        assert environment_of(gateway_container(documents))["GATEWAY_SHARED_MEMORY_BYTES"] == "268435456"

    @pytest.mark.parametrize(
        "triton", [{}, {"enabled": False, "external": {"grpcUrl": "a:1"}, **ON["triton"]}], ids=str
    )
    def test_by_default_and_with_an_external_triton_there_is_none(self, triton: Document) -> None:
        container = gateway_container(render({"triton": triton}))
        assert container["resources"]["limits"] == {"memory": "512Mi"}
        assert "/dev/shm" not in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "GATEWAY_SHARED_MEMORY_BYTES" not in environment_of(container)

    @pytest.mark.parametrize(("size", "limit"), [(268_435_456, "768Mi"), (268_435_457, "769Mi")])
    def test_the_gateways_memory_limit_includes_it(self, size: int, limit: str) -> None:
        values: Document = {"triton": {"sharedMemory": {"bytes": size}}}
        resources = gateway_container(render(values))["resources"]
        assert resources["limits"] == {"memory": limit}
        assert resources["requests"] == gateway_container(render())["resources"]["requests"]
        own = {"resources": {"limits": {"memory": "2Gi"}}}
        assert gateway_container(render({**values, "gateway": own}))["resources"]["limits"] == {"memory": "2Gi"}

    @pytest.mark.parametrize(
        ("shared", "is_given"),
        [
            ({}, False),
            ({"bytes": 1}, False),
            ({"allowOption": True}, False),
            ({"bytes": 1, "allowOption": True}, True),
        ],
        ids=str,
    )
    def test_the_option_of_newer_tritons_must_be_allowed(self, shared: Document, is_given: bool) -> None:
        arguments = triton_container(render({"triton": {"sharedMemory": shared}}))["args"]
        assert ("--allow-client-shm=true" in arguments) is is_given


def test_zero_gpus_removes_everything_about_gpus() -> None:
    documents = render({"triton": {"gpus": 0, "runtimeClassName": "nvidia", "entryPoint": ""}})
    assert "nvidia" not in str(pod_spec(documents))


def test_a_misspelled_strategy_is_rejected() -> None:
    with pytest.raises(ChartRefused, match=r"strategy\.type"):
        render({"strategy": {"type": "Recreat"}})


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


def test_the_test_pod_stays_until_the_next_test() -> None:
    """`helm test --logs` reads the log after Helm has deleted the pods with `hook-succeeded`, and fails."""
    (pod,) = of_kind(render(), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
    assert pod["spec"]["containers"][0]["image"] == gateway_container(render())["image"]


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
