"""Values and their places in the release; its pods as a whole; Triton's liveness probe, run by a real shell.

An upgrade keeps the ``gateway.yaml`` of running pods.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Require
from tests.helm.rendering import (
    CHART,
    NAMESPACE,
    RELEASE,
    ChartRefused,
    Document,
    check_container,
    gateway_container,
    helm,
    of_kind,
    pod_spec,
    render,
    the,
    the_gateway,
    triton_container,
)
from tests.toolkit.http_server import answering
from tests.toolkit.processes import free_ports

PLACES = yaml.safe_load(Path(__file__).with_name("values_and_places.yaml").read_text())


def at(documents: list[Document], place: str) -> Any:
    """Returns what the place has."""
    start, *path = place.split()
    starts = {"pod": pod_spec, "gateway": gateway_container, "triton": triton_container, "Deployment": the_gateway}
    found: Any
    if start in starts:
        found = starts[start](documents)
    else:
        kind, _, end = start.partition("/")
        candidates = [each for each in of_kind(documents, kind) if each["metadata"]["name"].endswith(end)]
        assert len(candidates) <= 1
        found = candidates[0] if candidates else None
    for key in path:
        if isinstance(found, dict):
            found = found.get(key)
        elif key.isdigit():
            found = found[int(key)]
        elif key.startswith("--"):
            found = next((each.partition("=")[2] for each in found if each.partition("=")[0] == key), None)
        else:
            found = next((each for each in found if each["name"] == key), None)
    return found


@pytest.mark.parametrize("row", PLACES, ids=lambda row: next(iter(row["places"])))
def test_a_value_reaches_its_places(row: Document) -> None:
    values = row["values"] if isinstance(row["values"], dict) else CHART / "ci" / row["values"]
    documents = render(values, kubernetes="1.36")
    assert {place: at(documents, place) for place in row["places"]} == row["places"]


@pytest.mark.parametrize("backend", ["vllm", "tensorrt-llm"])
def test_the_file_says_that_it_was_not_run(backend: str) -> None:
    assert "Not run on a GPU" in (CHART / "ci" / f"{backend}-values.yaml").read_text().splitlines()[0]


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


EVERYTHING = {
    "autoscaling": {"enabled": True},
    "config": {"source": "inline", "gatewayYaml": "pipelines: {}"},
    "dashboard": {"enabled": True},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "ingress": {"enabled": True, "hosts": ["a.example.com"]},
    "prometheusRule": {"enabled": True},
    "redis": {"enabled": True},
    "serviceMonitor": {"enabled": True},
}


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_every_object_has_the_common_labels_and_annotations(monitor: str) -> None:
    common = {"commonLabels": {"cost-center": "7"}, "commonAnnotations": {"example.com/owner": "team"}}
    plain = EVERYTHING | {"serviceMonitor": {"enabled": False}, monitor: {"enabled": True}}
    before, after = render(plain), render({**plain, **common})
    assert len({each["kind"] for each in after}) >= 12
    for old, new in zip(before, after, strict=True):
        labels, annotations = new["metadata"].pop("labels"), new["metadata"].pop("annotations")
        assert labels == old["metadata"].pop("labels") | common["commonLabels"]
        assert annotations == common["commonAnnotations"] | old["metadata"].pop("annotations", {})
        for pod in (new["spec"].get("template") for _ in "1" if new["kind"] == "Deployment"):
            assert pod["metadata"]["labels"].pop("cost-center") == "7"
        assert new == old


def test_the_check_has_the_program_and_the_files_of_the_gateway() -> None:
    documents = render(CHART / "ci" / "pvc-values.yaml")
    check, gateway = check_container(documents), gateway_container(documents)
    assert check["args"] == ["serve", "--check"]
    for key in (
        "image",
        "imagePullPolicy",
        "env",
        "envFrom",
        "volumeMounts",
        "securityContext",
        "resources",
    ):
        assert check[key] == gateway[key]
    assert "args" not in gateway


@contextmanager
def server_of(path: str, status: int | None) -> Iterator[int]:
    """Yields the port of a server that answers ``path`` with ``status``, or a port without a server for None."""
    if status is None:
        yield from free_ports(1)
        return
    with answering(lambda request, _: (status if request.path == path else 503, "text/plain", b"")) as port:
        yield port


@pytest.mark.parametrize(
    ("triton", "gateway", "is_live"),
    [
        (200, 200, True),
        (200, 503, False),
        (200, None, True),
        (200, 404, True),
        (400, 200, False),
        (None, 200, False),
    ],
    ids=["both", "stuck", "no gateway", "no such route", "not live", "no triton"],
)
def test_the_probe_fails_only_for_a_dead_or_stuck_triton(
    require: Require, triton: int | None, gateway: int | None, is_live: bool
) -> None:
    require(shutil.which("curl"), "there is no curl")
    assert passes(triton, gateway, os.getpid()) is is_live


@pytest.mark.parametrize(
    ("blocked", "is_live"),
    [({"SIGABRT"}, False), ({"SIGSEGV"}, False), ({"SIGABRT", "SIGSEGV", "SIGTERM"}, True), ({"SIGTERM"}, True)],
    ids=["abort", "segmentation fault", "many signals", "another signal"],
)
def test_the_probe_fails_while_a_crash_handler_runs(require: Require, blocked: set[str], is_live: bool) -> None:
    """The kernel blocks a signal in the thread that handles it."""
    require(shutil.which("curl"), "there is no curl")
    signals = {signal.Signals[name] for name in blocked}
    block = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {set(map(int, signals))}); print(); input()"
    with subprocess.Popen([sys.executable, "-c", block], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert passes(200, 200, process.pid) is is_live
        process.stdin.write(b"\n")


def passes(triton: int | None, gateway: int | None, process: int) -> bool:
    """Runs the command of the probe. It sees one process of this machine."""
    command = triton_container(render())["livenessProbe"]["exec"]["command"]
    with ExitStack() as stack:
        places = {
            ":8000/": f":{stack.enter_context(server_of('/v2/health/live', triton))}/",
            ":8081/": f":{stack.enter_context(server_of('/health/triton', gateway))}/",
            "/proc/[0-9]*/": f"/proc/{process}/",
        }
        for place, actual in places.items():
            assert command[-1].count(place) == 1
            command[-1] = command[-1].replace(place, actual)
        return subprocess.run(command, check=False, timeout=20).returncode == 0


VERBS = ["get", "list"]
DISCOVERY: dict[str, Document] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]}],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "configmaps", "namespaced": True, "kind": "ConfigMap", "verbs": VERBS}],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [{"name": "replicasets", "namespaced": True, "kind": "ReplicaSet", "verbs": VERBS}],
    },
}


def inline(text: str, **files: str) -> Document:
    return {"config": {"source": "inline", "gatewayYaml": text, "files": files}}


def mounted(documents: list[Document]) -> str:
    """The name of the ConfigMap that the pods mount."""
    (volume,) = (each for each in pod_spec(documents)["volumes"] if each["name"] == "config")
    return str(volume["configMap"]["name"])


def test_each_content_has_a_separate_config_map() -> None:
    contents = [inline("pipelines: {}"), inline("pipelines: {a: {model: b}}"), inline("pipelines: {}", x="1")]
    names = [mounted(render(values)) for values in contents]
    assert len(set(names)) == 3
    assert names[0] == mounted(render({**contents[0], "replicaCount": 2}))
    assert names[0].startswith(f"{RELEASE}-triton-gateway-config-")


class Cluster:
    """The read requests of a Kubernetes API server that Helm's ``lookup`` sends."""

    def __init__(self) -> None:
        self.replica_sets: list[Document] = []
        self.config_maps: dict[str, Document] = {}
        self.url = ""

    def runs(self, documents: list[Document], pods: int = 1) -> None:
        """A ReplicaSet of the release's Deployment has this number of pods."""
        template = the(documents, "Deployment")["spec"]["template"]
        status = {"replicas": pods} if pods else {}
        self.replica_sets.append({"metadata": template["metadata"], "spec": {"template": template}, "status": status})
        self.config_maps |= {each["metadata"]["name"]: each for each in of_kind(documents, "ConfigMap")}

    def answer(self, path: str) -> Document | None:
        folder, _, name = path.rpartition("/")
        if path == f"/apis/apps/v1/namespaces/{NAMESPACE}/replicasets":
            return {"kind": "ReplicaSetList", "apiVersion": "apps/v1", "items": self.replica_sets}
        if folder == f"/api/v1/namespaces/{NAMESPACE}/configmaps":
            return self.config_maps.get(name)
        return DISCOVERY.get(path)

    def upgraded(self, values: Document) -> list[Document]:
        """The documents of an upgrade, for which Helm may read this cluster."""
        options = ["--dry-run=server", "--kube-apiserver", self.url, "--namespace", NAMESPACE]
        text = helm("template", RELEASE, str(CHART), *options, "--values", "-", stdin=json.dumps(values))
        return [each for each in yaml.safe_load_all(text) if each]


@contextmanager
def cluster() -> Iterator[Cluster]:
    made = Cluster()

    def answer(request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str, bytes]:
        found = made.answer(request.path.partition("?")[0])
        body = json.dumps(found or {"kind": "Status", "code": 404, "reason": "NotFound"}).encode()
        return 200 if found else 404, "application/json", body

    with answering(answer) as port:
        made.url = f"http://127.0.0.1:{port}"
        yield made


def config_maps(documents: list[Document]) -> dict[str, str]:
    """The text of gateway.yaml by the ConfigMap's name."""
    return {each["metadata"]["name"]: each["data"]["gateway.yaml"] for each in of_kind(documents, "ConfigMap")}


def test_an_upgrade_keeps_the_config_map_of_running_pods() -> None:
    old, new = render(inline("old", **{"a/b": "text"})), inline("new")
    with cluster() as made:
        made.runs(old)
        documents = made.upgraded(new)
        kept = next(each for each in of_kind(documents, "ConfigMap") if each["data"]["gateway.yaml"] == "old")
        assert kept == the(old, "ConfigMap")
        assert config_maps(documents)[mounted(documents)] == "new"
        assert sorted(config_maps(documents).values()) == ["new", "old"]
        assert list(config_maps(made.upgraded({"config": {"source": "models"}})).values()) == ["old"], "turned off"


def test_an_upgrade_deletes_config_maps_that_no_pod_of_the_release_uses() -> None:
    with cluster() as made:
        made.runs(render(inline("old")), pods=0)
        made.runs(render(inline("other")))
        made.replica_sets[1]["metadata"]["labels"]["app.kubernetes.io/instance"] = "another release"
        made.runs(render(inline("now")))
        assert sorted(config_maps(made.upgraded(inline("new"))).values()) == ["new", "now"]
        assert sorted(config_maps(made.upgraded(inline("now"))).values()) == ["now"]
