"""Values that adapt the pods to a cluster."""

import pytest

from app.settings import read_settings
from tests.helm.cross_checks import faults
from tests.helm.rendering import (
    CHART,
    Document,
    check_container,
    environment_of,
    gateway_container,
    of_kind,
    pod_spec,
    render,
    the,
    triton_container,
)

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
    assert names == ["fetch", "check", "triton"]
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


def test_an_objects_own_annotation_wins() -> None:
    values = {"commonAnnotations": {"a": "all", "b": "all"}, "service": {"annotations": {"a": "own"}}}
    assert the(render(values), "Service")["metadata"]["annotations"] == {"a": "own", "b": "all"}


def test_extra_containers_run_beside_the_gateway() -> None:
    own = {"name": "forward", "image": "forward:1"}
    containers = pod_spec(render({"extraContainers": [own]}))["containers"]
    assert [each["name"] for each in containers] == ["gateway", "forward"]
    assert containers[1] == own


def test_the_sleep_of_a_hook_is_part_of_the_grace_period() -> None:
    usual = pod_spec(render())["terminationGracePeriodSeconds"]
    lifecycle = {"preStop": {"sleep": {"seconds": 25}}}
    documents = render({"gateway": {"lifecycle": lifecycle}})
    assert gateway_container(documents)["lifecycle"] == lifecycle
    assert pod_spec(documents)["terminationGracePeriodSeconds"] == usual + 25
    assert faults(documents) == {}
    command = {"preStop": {"exec": {"command": ["true"]}}}
    assert pod_spec(render({"gateway": {"lifecycle": command}}))["terminationGracePeriodSeconds"] == usual


def test_names_and_hosts_of_the_pod_can_be_set() -> None:
    aliases = [{"ip": "10.0.0.1", "hostnames": ["a"]}]
    pod = pod_spec(render({"hostAliases": aliases, "dnsConfig": {"searches": ["b"]}}))
    assert (pod["hostAliases"], pod["dnsConfig"]) == (aliases, {"searches": ["b"]})


def test_a_pod_must_stay_ready_before_the_rollout_goes_on() -> None:
    usual = the(render(), "Deployment")["spec"]
    spec = the(render({"minReadySeconds": 30}), "Deployment")["spec"]
    assert "minReadySeconds" not in usual
    assert spec["minReadySeconds"] == 30
    assert spec["progressDeadlineSeconds"] == usual["progressDeadlineSeconds"] + 30


def test_the_size_of_the_gateways_tmp_can_be_set() -> None:
    volumes = pod_spec(render({"gateway": {"tmpSize": "2Gi"}}))["volumes"]
    assert {"name": "gateway-tmp", "emptyDir": {"sizeLimit": "2Gi"}} in volumes


@pytest.mark.parametrize("engine", ["hpa", "keda"])
def test_a_custom_behavior_replaces_the_autoscalers(engine: str) -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 60}}
    scaling = {"enabled": True, "engine": engine, "prometheusUrl": "http://p", "behavior": behavior}
    documents = render({"autoscaling": scaling, "podMonitor": {"enabled": True}})
    if engine == "hpa":
        assert the(documents, "HorizontalPodAutoscaler")["spec"]["behavior"] == behavior
    else:
        advanced = the(documents, "ScaledObject")["spec"]["advanced"]
        assert advanced["horizontalPodAutoscalerConfig"]["behavior"] == behavior


def test_keda_can_authenticate_at_prometheus() -> None:
    scaling = {"enabled": True, "engine": "keda", "prometheusUrl": "https://p", "authModes": "tls,basic"}
    scaling["authenticationRef"] = {"name": "prometheus"}
    (trigger,) = the(render({"autoscaling": scaling, "podMonitor": {"enabled": True}}), "ScaledObject")["spec"][
        "triggers"
    ]
    assert trigger["authenticationRef"] == {"name": "prometheus"}
    assert trigger["metadata"]["authModes"] == "tls,basic"


@pytest.mark.parametrize(
    ("monitor", "kind", "endpoints", "own"),
    [("podMonitor", "PodMonitor", "podMetricsEndpoints", 0), ("serviceMonitor", "ServiceMonitor", "endpoints", 1)],
)
def test_monitors_have_a_time_limit_and_relabelings(monitor: str, kind: str, endpoints: str, own: int) -> None:
    """``own``: the number of the chart's relabelings, which come first."""
    rules = {"relabelings": [{"targetLabel": "a"}], "metricRelabelings": [{"action": "drop"}], "timeoutSeconds": 5}
    for endpoint in the(render({monitor: {"enabled": True, **rules}}), kind)["spec"][endpoints]:
        assert endpoint["scrapeTimeout"] == "5s"
        assert endpoint["relabelings"][own:] == rules["relabelings"]
        assert endpoint["metricRelabelings"] == rules["metricRelabelings"]
    usual = {"port", "path", "interval"} | ({"relabelings"} if own else set())
    assert {*the(render({monitor: {"enabled": True}}), kind)["spec"][endpoints][0]} == usual


@pytest.mark.parametrize(
    ("policy", "host"),
    [("", "0.0.0.0"), ("SingleStack", "0.0.0.0"), ("PreferDualStack", "::"), ("RequireDualStack", "::")],
)
def test_the_gateway_listens_on_the_families_of_its_service(policy: str, host: str) -> None:
    documents = render({"service": {"ipFamilyPolicy": policy}})
    assert the(documents, "Service")["spec"].get("ipFamilyPolicy", "") == policy
    assert read_settings(environment_of(gateway_container(documents)), {}).host == host


def test_the_service_can_prefer_close_pods() -> None:
    values = {"service": {"trafficDistribution": "PreferSameNode"}}
    assert the(render(values), "Service")["spec"]["trafficDistribution"] == "PreferSameNode"


def test_triton_uses_the_resource_claims_of_the_pod() -> None:
    """A pod with claims is replaced like a pod with GPUs: a second pod may find no free device."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    documents = render({"resourceClaims": claims, "triton": {"gpus": 0}}, kubernetes="1.36")
    assert pod_spec(documents)["resourceClaims"] == claims
    assert triton_container(documents)["resources"]["claims"] == [{"name": "gpu"}]
    assert "claims" not in gateway_container(documents)["resources"]
    assert the(documents, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert "nvidia.com/gpu" not in triton_container(documents)["resources"]["limits"]


@pytest.mark.parametrize(
    ("resource", "taint"),
    [
        ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("nvidia.com/mig-1g.10gb", "nvidia.com/gpu"),
        ("nvidia.com/gpu.shared", "nvidia.com/gpu"),
        ("amd.com/gpu", "amd.com/gpu"),
    ],
)
def test_a_pod_tolerates_the_taint_of_gpu_nodes(resource: str, taint: str) -> None:
    documents = render({"triton": {"gpuResource": resource}})
    assert pod_spec(documents)["tolerations"] == [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}]
    assert triton_container(documents)["resources"]["limits"][resource] == 1


def test_the_check_has_the_program_and_the_files_of_the_gateway() -> None:
    documents = render(CHART / "ci" / "pvc-values.yaml")
    check, gateway = check_container(documents), gateway_container(documents)
    assert check["args"] == ["serve", "--check"]
    for key in (
        "image",
        "imagePullPolicy",
        "workingDir",
        "env",
        "envFrom",
        "volumeMounts",
        "securityContext",
        "resources",
    ):
        assert check[key] == gateway[key]
    assert "args" not in gateway
