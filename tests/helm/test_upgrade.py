"""An upgrade keeps the ``gateway.yaml`` of running pods."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import yaml

from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Document, helm, of_kind, pod_spec, render, the
from tests.toolkit.http_server import answering

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
