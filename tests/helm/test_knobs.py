"""Values that adapt the pods to a cluster."""

import pytest

from tests.helm.rendering import Document, gateway_container, of_kind, pod_spec, render, the, triton_container

VOLUME = {"name": "ca", "configMap": {"name": "private-ca"}}
MOUNT = {"name": "ca", "mountPath": "/etc/private-ca"}


def test_extra_volumes_are_mounted_in_the_named_container() -> None:
    documents = render({"extraVolumes": [VOLUME], "gateway": {"extraVolumeMounts": [MOUNT]}})
    assert VOLUME in pod_spec(documents)["volumes"]
    assert MOUNT in gateway_container(documents)["volumeMounts"]
    assert MOUNT not in triton_container(documents)["volumeMounts"]
    assert MOUNT in triton_container(render({"triton": {"extraVolumeMounts": [MOUNT]}}))["volumeMounts"]


def test_extra_init_containers_run_before_triton() -> None:
    own = {"name": "fetch", "image": "fetch:1"}
    names = [each["name"] for each in pod_spec(render({"extraInitContainers": [own]}))["initContainers"]]
    assert names == ["fetch", "triton"]
    external = {"enabled": False, "external": {"grpcUrl": "triton:8001"}}
    assert pod_spec(render({"extraInitContainers": [own], "triton": external}))["initContainers"] == [own]


@pytest.mark.parametrize("container", ["gateway", "triton"])
def test_env_from_adds_sources_of_variables(container: str) -> None:
    source = [{"configMapRef": {"name": "more"}}]
    documents = render({container: {"envFrom": source}})
    read = {"gateway": gateway_container, "triton": triton_container}[container]
    assert read(documents)["envFrom"] == source


def test_env_from_keeps_the_secret_of_the_bucket() -> None:
    source = {"configMapRef": {"name": "more"}}
    models = {"source": "objectStore", "objectStore": {"url": "s3://bucket", "secretName": "bucket"}}
    triton = triton_container(render({"triton": {"envFrom": [source], "models": models}}))
    assert triton["envFrom"] == [{"secretRef": {"name": "bucket"}}, source]


def test_pull_secrets_are_names_or_objects() -> None:
    documents = render({"imagePullSecrets": ["one", {"name": "two"}]})
    assert pod_spec(documents)["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert the(documents, "Pod")["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


@pytest.mark.parametrize(
    ("repository", "image"),
    [
        ("triton-gateway", "mirror.example.com:5000/team/triton-gateway:0.1.0"),
        ("vision/triton-gateway", "mirror.example.com:5000/team/vision/triton-gateway:0.1.0"),
        ("registry.example.com/triton-gateway", "registry.example.com/triton-gateway:0.1.0"),
    ],
)
def test_the_global_registry_is_for_images_without_one(repository: str, image: str) -> None:
    values: Document = {"gateway": {"image": {"repository": repository}}}
    values["global"] = {"imageRegistry": "mirror.example.com:5000/team", "of": {"another": "chart"}}
    documents = render(values)
    assert gateway_container(documents)["image"] == image
    assert the(documents, "Pod")["spec"]["containers"][0]["image"] == image
    assert triton_container(documents)["image"] == "mirror.example.com:5000/team/triton-gateway-models:0.1.0"


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_each_setting_of_the_gateways_probes_can_be_changed(probe: str) -> None:
    usual = gateway_container(render())[probe]
    changed = gateway_container(render({"gateway": {probe: {"failureThreshold": 99}}}))[probe]
    assert changed == usual | {"failureThreshold": 99}


def test_each_setting_of_tritons_probe_can_be_changed() -> None:
    usual = triton_container(render())["livenessProbe"]
    changed = triton_container(render({"triton": {"livenessProbe": {"timeoutSeconds": 20}}}))["livenessProbe"]
    assert changed == usual | {"timeoutSeconds": 20}


def test_the_service_can_be_a_restricted_load_balancer() -> None:
    service = {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
    }
    assert service.items() <= the(render({"service": service}), "Service")["spec"].items()


def test_replicas_history_and_disruption_budget_can_be_set() -> None:
    values = {"replicaCount": 4, "revisionHistoryLimit": 2, "podDisruptionBudget": {"maxUnavailable": "25%"}}
    documents = render(values)
    spec = the(documents, "Deployment")["spec"]
    assert (spec["replicas"], spec["revisionHistoryLimit"]) == (4, 2)
    assert the(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == "25%"


def test_extra_objects_are_part_of_the_release() -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-own"}}
    (found,) = of_kind(render({"extraObjects": [secret]}), "Secret")
    assert found["metadata"]["name"] == "demo-own"
