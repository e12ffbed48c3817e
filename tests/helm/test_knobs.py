"""Values that adapt the pods to a cluster."""

from typing import Any

import pytest

from app.settings import read_settings
from tests.helm.cross_checks import faults
from tests.helm.rendering import (
    CHART,
    Document,
    check_container,
    environment_of,
    gateway_container,
    pod_spec,
    render,
    the,
    triton_container,
)

VOLUME = {"name": "ca", "configMap": {"name": "private-ca"}}
MOUNT = {"name": "ca", "mountPath": "/etc/private-ca"}


DIGEST = f"sha256:{'0' * 64}"
CONFIG_MAP = {"configMapRef": {"name": "more"}}
BUCKET = {"source": "objectStore", "objectStore": {"url": "s3://bucket", "secretName": "bucket"}}
CLAIM = {"source": "persistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "subPath": "v3"}}
CLAIM_MOUNT = {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "v3"}
MODELS_IMAGE = {"source": "containerImage", "containerImage": {"reference": "models:1"}}
EXTERNAL = {"enabled": False, "external": {"grpcUrl": "a:1"}}
OWN_STRATEGY = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}}
OWN_RESOURCES = {"requests": {"cpu": "250m"}, "limits": {"memory": "2Gi", "cpu": 1}}
BEHAVIOR = {"scaleDown": {"stabilizationWindowSeconds": 60}}
KEDA = {"enabled": True, "engine": "keda", "prometheusUrl": "https://p", "behavior": BEHAVIOR, "authModes": "tls,basic"}
KEDA |= {"authenticationRef": {"name": "prometheus"}}
INTERNAL = {"type": "LoadBalancer", "loadBalancerClass": "example.com/internal", "externalTrafficPolicy": "Local"}
INTERNAL |= {"loadBalancerSourceRanges": ["10.0.0.0/8"], "trafficDistribution": "PreferSameNode"}
OF_ALL = {"commonAnnotations": {"a": "all", "b": "all"}, "service": {"annotations": {"a": "own"}}}
SHARED = {"triton": {"sharedMemory": {"bytes": 268_435_456}}}
EXIT_KEY = {"secretKeyRef": {"name": "keys", "key": "exit"}}
NGINX, F5 = (f"Ingress metadata annotations {prefix}" for prefix in ("nginx.ingress.kubernetes.io", "nginx.org"))
HOSTS = {"enabled": True, "hosts": ["a.example", "b.example"]}
OWN_ANNOTATIONS = {"nginx.ingress.kubernetes.io/proxy-body-size": "1m", "a.example/b": "c"}

PLACES: list[tuple[Document, dict[str, Any]]] = [
    ({"extraVolumes": [VOLUME]}, {"pod volumes ca": VOLUME}),
    ({"gateway": {"extraVolumeMounts": [MOUNT]}}, {"gateway volumeMounts ca": MOUNT, "triton volumeMounts ca": None}),
    ({"triton": {"extraVolumeMounts": [MOUNT]}}, {"triton volumeMounts ca": MOUNT}),
    ({"gateway": {"tmpSize": "2Gi"}}, {"pod volumes gateway-tmp emptyDir": {"sizeLimit": "2Gi"}}),
    ({"triton": {"shmSize": "3Gi"}}, {"pod volumes shm emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}}),
    ({"gateway": {"envFrom": [CONFIG_MAP]}}, {"gateway envFrom": [CONFIG_MAP]}),
    ({"triton": {"envFrom": [CONFIG_MAP]}}, {"triton envFrom": [CONFIG_MAP]}),
    (
        {"triton": {"envFrom": [CONFIG_MAP], "models": BUCKET}},
        {"triton envFrom": [{"secretRef": {"name": "bucket"}}, CONFIG_MAP]},
    ),
    ({"imagePullSecrets": ["one", {"name": "two"}]}, {"pod imagePullSecrets": [{"name": "one"}, {"name": "two"}]}),
    ({"imagePullSecrets": ["one"]}, {"Pod spec imagePullSecrets": [{"name": "one"}]}),
    ({"extraContainers": [{"name": "own", "image": "i"}]}, {"pod containers own": {"name": "own", "image": "i"}}),
    ({"hostAliases": [{"ip": "10.0.0.1"}]}, {"pod hostAliases": [{"ip": "10.0.0.1"}]}),
    ({"dnsConfig": {"searches": ["b"]}}, {"pod dnsConfig": {"searches": ["b"]}}),
    (
        {"gateway": {"image": {"repository": "r:5/g", "tag": "1", "digest": DIGEST}}},
        {"gateway image": f"r:5/g@{DIGEST}"},
    ),
    *(
        ({"gateway": {probe: {"failureThreshold": 99}}}, {f"gateway {probe} failureThreshold": 99})
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    ),
    ({}, {"gateway readinessProbe httpGet path": "/health/ready", "triton readinessProbe": None}),
    ({"triton": {"livenessProbe": {"timeoutSeconds": 20}}}, {"triton livenessProbe timeoutSeconds": 20}),
    ({"triton": {"startupSeconds": 10}}, {"triton startupProbe failureThreshold": 5}),
    ({"triton": {"startupSeconds": 601}}, {"triton startupProbe failureThreshold": 301}),
    ({"service": INTERNAL}, {f"Service spec {key}": value for key, value in INTERNAL.items()}),
    (
        {"service": {"port": 8000}},
        {"Service spec ports": [{"name": "http", "port": 8000, "targetPort": "http", "appProtocol": "http"}]},
    ),
    (
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        {"HTTPRoute spec rules 0 timeouts": {"request": "0s", "backendRequest": "0s"}},
    ),
    (OF_ALL, {"Service metadata annotations": {"a": "own", "b": "all"}}),
    ({"replicaCount": 4}, {"Deployment spec replicas": 4}),
    ({"revisionHistoryLimit": 2}, {"Deployment spec revisionHistoryLimit": 2}),
    ({}, {"Deployment spec minReadySeconds": None, "Deployment spec strategy": {"type": "Recreate"}}),
    (
        {},
        {
            "PodDisruptionBudget spec maxUnavailable": 1,
            "PodDisruptionBudget spec unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    ),
    ({"podDisruptionBudget": {"maxUnavailable": "25%"}}, {"PodDisruptionBudget spec maxUnavailable": "25%"}),
    *(
        (
            {"replicaCount": 3, "podDisruptionBudget": {"minAvailable": number}},
            {"PodDisruptionBudget spec minAvailable": number, "PodDisruptionBudget spec maxUnavailable": None},
        )
        for number in (2, "50%")
    ),
    ({"strategy": OWN_STRATEGY}, {"Deployment spec strategy": OWN_STRATEGY}),
    *(
        (values, {"Deployment spec strategy rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}})
        for values in ({"replicaCount": 2}, {"autoscaling": {"enabled": True}})
    ),
    *(
        ({"triton": triton}, {"Deployment spec strategy rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
        for triton in ({"gpus": 0}, EXTERNAL)
    ),
    ({"triton": {"runtimeClassName": "nvidia"}}, {"pod runtimeClassName": "nvidia"}),
    ({"triton": {"gpus": 2}}, {"triton resources limits nvidia.com/gpu": 2}),
    (
        {"triton": {"resources": {"limits": {"memory": "9Gi"}}}},
        {"triton resources limits": {"memory": "9Gi", "nvidia.com/gpu": 1}},
    ),
    ({"triton": {"resources": None}}, {"triton resources": {"limits": {"nvidia.com/gpu": 1}}}),
    *(
        (
            {"triton": {"gpuResource": resource}},
            {"pod tolerations": [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}]},
        )
        for resource, taint in (
            ("nvidia.com/gpu", "nvidia.com/gpu"),
            ("nvidia.com/mig-1g.10gb", "nvidia.com/gpu"),
            ("nvidia.com/gpu.shared", "nvidia.com/gpu"),
            ("amd.com/gpu", "amd.com/gpu"),
        )
    ),
    ({"triton": {"gpuResource": "amd.com/gpu"}}, {"triton resources limits amd.com/gpu": 1}),
    *(
        (values, {"gateway resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": limits}})
        for values, cpu, memory, limits in (
            ({"gateway": {"workers": 1, "resources": None}}, "500m", "256Mi", {"memory": "512Mi"}),
            ({"gateway": {"workers": 4, "resources": None}}, "4", "768Mi", {"memory": "1024Mi"}),
            ({"gateway": {"workers": 2, "resources": OWN_RESOURCES}}, "250m", "512Mi", {"memory": "2Gi", "cpu": 1}),
            (SHARED, "500m", "256Mi", {"memory": "768Mi"}),
            ({"triton": {"sharedMemory": {"bytes": 268_435_457}}}, "500m", "256Mi", {"memory": "769Mi"}),
        )
    ),
    (
        {**SHARED, "gateway": {"resources": {"limits": {"memory": "2Gi"}}}},
        {"gateway resources limits": {"memory": "2Gi"}},
    ),
    (
        SHARED,
        {
            "gateway volumeMounts shm mountPath": "/dev/shm",
            "triton volumeMounts shm mountPath": "/dev/shm",
            "pod volumes shm emptyDir medium": "Memory",
            "gateway env GATEWAY_SHARED_MEMORY_BYTES value": "268435456",
        },
    ),
    *(
        (
            {"triton": triton},
            {
                "gateway resources limits": {"memory": "512Mi"},
                "gateway volumeMounts shm": None,
                "gateway env GATEWAY_SHARED_MEMORY_BYTES": None,
            },
        )
        for triton in ({}, EXTERNAL | SHARED["triton"])
    ),
    *(
        ({"triton": {"sharedMemory": shared}}, {"triton args --allow-client-shm": given})
        for shared, given in (
            ({}, None),
            ({"bytes": 1}, None),
            ({"allowOption": True}, None),
            ({"bytes": 1, "allowOption": True}, "true"),
        )
    ),
    (
        {"triton": {"models": CLAIM}},
        {
            "pod volumes models persistentVolumeClaim": {"claimName": "models", "readOnly": True},
            "triton volumeMounts models": CLAIM_MOUNT,
        },
    ),
    (
        {"triton": {"models": BUCKET}},
        {"triton args --model-repository": "s3://bucket", "triton envFrom": [{"secretRef": {"name": "bucket"}}]},
    ),
    (
        {"triton": {"models": MODELS_IMAGE}},
        {"pod volumes models image": {"reference": "models:1", "pullPolicy": "IfNotPresent"}},
    ),
    (
        {},
        {
            "triton args --model-repository": "/models",
            "triton args --grpc-max-response-pool-size": None,
            "triton args --trace-config": None,
            "triton args --grpc-address": "127.0.0.1",
            "triton args --http-address": "127.0.0.1",
            "triton args --metrics-address": "0.0.0.0",
            "triton ports": [{"name": "triton-metrics", "containerPort": 8002}],
            "pod runtimeClassName": None,
        },
    ),
    ({"triton": {"maxQueuedResponses": 64}}, {"triton args --grpc-max-response-pool-size": "64"}),
    ({"autoscaling": {"enabled": True, "behavior": BEHAVIOR}}, {"HorizontalPodAutoscaler spec behavior": BEHAVIOR}),
    (
        {"autoscaling": KEDA, "podMonitor": {"enabled": True}},
        {
            "ScaledObject spec advanced horizontalPodAutoscalerConfig behavior": BEHAVIOR,
            "ScaledObject spec triggers 0 authenticationRef": {"name": "prometheus"},
            "ScaledObject spec triggers 0 metadata authModes": "tls,basic",
        },
    ),
    (
        {},
        {
            "Pod metadata annotations helm.sh/hook": "test",
            "Pod metadata annotations helm.sh/hook-delete-policy": "before-hook-creation",
        },
    ),
    (
        {"extraObjects": [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-own"}}]},
        {"Secret metadata name": "demo-own"},
    ),
    (
        {"gateway": {"earlyExitKey": {"secretName": "keys", "secretKey": "exit"}}},
        {
            "gateway env GATEWAY_EARLY_EXIT_KEY valueFrom": EXIT_KEY,
            "triton env EARLY_EXIT_KEY valueFrom": EXIT_KEY,
        },
    ),
    (
        {"gateway": {"logTensors": "shapes"}},
        {"triton env": [{"name": "GATEWAY_LOG_TENSORS", "value": "shapes"}]},
    ),
    ({}, {"gateway env GATEWAY_REDIS_URL": None}),
    (
        {"gateway": {"redis": {"secretName": "shared", "secretKey": "url"}}},
        {
            "gateway env GATEWAY_REDIS_URL valueFrom": {"secretKeyRef": {"name": "shared", "key": "url"}},
            "triton env": None,
            "triton envFrom": None,
        },
    ),
    (
        {"ingress": HOSTS, "shutdown": {"longestStreamSeconds": 1800}},
        {
            f"{NGINX}/proxy-buffering": "off",
            f"{NGINX}/proxy-read-timeout": "1800",
            f"{NGINX}/proxy-send-timeout": "1800",
            f"{F5}/proxy-buffering": "False",
            f"{F5}/proxy-read-timeout": "1800s",
            f"{F5}/websocket-services": "demo-triton-gateway",
            "Service metadata name": "demo-triton-gateway",
            "Ingress metadata annotations haproxy.org/timeout-server": "1800s",
            "Ingress spec tls": None,
        },
    ),
    (
        {"ingress": HOSTS, "gateway": {"maxBodyBytes": 1_048_576}},
        {f"{NGINX}/proxy-body-size": "67108864", f"{F5}/client-max-body-size": "67108864"},
    ),
    (
        {"ingress": {**HOSTS, "annotations": OWN_ANNOTATIONS}},
        {
            f"{NGINX}/proxy-body-size": "1m",
            "Ingress metadata annotations a.example/b": "c",
            f"{NGINX}/proxy-buffering": "off",
        },
    ),
]
"""Values, and places in the release with what they have then: None if a place has nothing."""


def at(documents: list[Document], place: str) -> Any:
    """Returns what the place has. It begins with a kind of object, ``pod``, or the name of a container."""
    start, *path = place.split()
    starts = {"pod": pod_spec, "gateway": gateway_container, "triton": triton_container}
    found: Any = starts[start](documents) if start in starts else the(documents, start)
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


@pytest.mark.parametrize(("values", "places"), PLACES, ids=lambda each: next(iter(each)) if " " in str(each) else "")
def test_a_value_reaches_its_places(values: Document, places: dict[str, Any]) -> None:
    documents = render(values, kubernetes="1.36")
    assert {place: at(documents, place) for place in places} == places


def test_extra_init_containers_run_before_triton() -> None:
    own = {"name": "fetch", "image": "fetch:1"}
    names = [each["name"] for each in pod_spec(render({"extraInitContainers": [own]}))["initContainers"]]
    assert names == ["fetch", "check", "triton"]
    external = {"enabled": False, "external": {"grpcUrl": "triton:8001"}}
    assert pod_spec(render({"extraInitContainers": [own], "triton": external}))["initContainers"] == [own]


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


def test_the_sleep_of_a_hook_is_part_of_the_grace_period() -> None:
    usual = pod_spec(render())["terminationGracePeriodSeconds"]
    lifecycle = {"preStop": {"sleep": {"seconds": 25}}}
    documents = render({"gateway": {"lifecycle": lifecycle}})
    assert gateway_container(documents)["lifecycle"] == lifecycle
    assert pod_spec(documents)["terminationGracePeriodSeconds"] == usual + 25
    assert faults(documents) == {}
    command = {"preStop": {"exec": {"command": ["true"]}}}
    assert pod_spec(render({"gateway": {"lifecycle": command}}))["terminationGracePeriodSeconds"] == usual


def test_a_pod_must_stay_ready_before_the_rollout_goes_on() -> None:
    usual = the(render(), "Deployment")["spec"]
    spec = the(render({"minReadySeconds": 30}), "Deployment")["spec"]
    assert "minReadySeconds" not in usual
    assert spec["minReadySeconds"] == 30
    assert spec["progressDeadlineSeconds"] == usual["progressDeadlineSeconds"] + 30


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


def test_triton_uses_the_resource_claims_of_the_pod() -> None:
    """A pod with claims is replaced like a pod with GPUs: a second pod may find no free device."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    documents = render({"resourceClaims": claims, "triton": {"gpus": 0}}, kubernetes="1.36")
    assert pod_spec(documents)["resourceClaims"] == claims
    assert triton_container(documents)["resources"]["claims"] == [{"name": "gpu"}]
    assert "claims" not in gateway_container(documents)["resources"]
    assert the(documents, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert "nvidia.com/gpu" not in triton_container(documents)["resources"]["limits"]


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
