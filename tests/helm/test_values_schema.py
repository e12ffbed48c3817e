"""values.schema.json is closed: helm rejects misspelt keys and values out of range."""

import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.helm.rendering import CHART, ChartRefused, Document, render_text

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
HANDED_ON = {("definitions", "kubernetesObject"), ("properties", "global")}
DEFINED_BY_KUBERNETES = {"securityContext", "resources", "strategy", "startupProbe", "livenessProbe", "readinessProbe"}
DEFINED_BY_KUBERNETES |= {"lifecycle", "behavior", "authenticationRef"}

NEEDS = {
    "triton.external.grpcUrl is needed": {"triton": {"enabled": False}},
    "triton.external.grpcUrl is not used": {"triton": {"external": {"grpcUrl": "triton:8001"}}},
    "triton.external is not used": {"triton": {"external": {"tls": {"enabled": True}}}},
    "triton.external.tls.enabled is needed": {
        "triton": {"enabled": False, "external": {"grpcUrl": "triton:8001", "token": {"secretName": "token"}}}
    },
    "triton.external.tls.secretName is needed": {
        "triton": {
            "enabled": False,
            "external": {"grpcUrl": "triton:8001", "tls": {"enabled": True, "clientCertificate": True}},
        }
    },
    "claimName is needed": {"triton": {"models": {"source": "persistentVolumeClaim"}}},
    "objectStore.url is needed": {"triton": {"models": {"source": "objectStore"}}},
    "containerImage.reference is needed": {"triton": {"models": {"source": "containerImage"}}},
    "needs Kubernetes 1.35": {"triton": {"models": {"source": "containerImage", "containerImage": {"reference": "m"}}}},
    "config.source: inline and config.gatewayYaml need each other": {"config": {"source": "inline"}},
    "config.files and config.binaryFiles are not used": {"config": {"files": {"chat.jinja": ""}}},
    "minReplicas is above": {"autoscaling": {"enabled": True, "minReplicas": 9}},
    "autoscaling.engine: keda needs": {"autoscaling": {"enabled": True, "engine": "keda", "prometheusUrl": "http://p"}},
    "ingress.hosts is needed": {"ingress": {"enabled": True}},
    "httpRoute.parentRefs is needed": {"httpRoute": {"enabled": True}},
    "need service.type: LoadBalancer": {"service": {"loadBalancerClass": "example.com/internal"}},
    "needs service.type: NodePort or LoadBalancer": {"service": {"externalTrafficPolicy": "Local"}},
    "networkPolicy.monitoring is needed": {"networkPolicy": {"monitoring": None}},
    "/tmp/models is a folder that Triton writes to": {"triton": {"models": {"path": "/tmp/models"}}},
    "paths 'a/b' and 'a__b' have the same key": {
        "config": {"source": "inline", "gatewayYaml": "x", "files": {"a/b": ""}, "binaryFiles": {"a__b": "AA=="}}
    },
    "'app.kubernetes.io/name' is a label that the chart sets": {"podLabels": {"app.kubernetes.io/name": "mine"}},
    "'app.kubernetes.io/part-of' is in both": {
        "podLabels": {"app.kubernetes.io/part-of": "a"}, "commonLabels": {"app.kubernetes.io/part-of": "b"}
    },
    "serviceMonitor.timeoutSeconds is above serviceMonitor.intervalSeconds": {"serviceMonitor": {"timeoutSeconds": 16}},
    "autoscaling.authModes needs autoscaling.authenticationRef": {"autoscaling": {"authModes": "bearer"}},
    "resourceClaims are for the sidecar": {
        "resourceClaims": [{"name": "gpu"}], "triton": {"enabled": False, "external": {"grpcUrl": "triton:8001"}}
    },
    "resourceClaims need Kubernetes 1.34": {"resourceClaims": [{"name": "gpu"}]},
    "prometheusRule.enabled needs podMonitor.enabled": {"prometheusRule": {"enabled": True}},
    "podMonitor.enabled and serviceMonitor.enabled: choose one": {
        "podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}
    },
    "50% of 1 pods would block every drain": {"podDisruptionBudget": {"minAvailable": "50%"}},
    "tests.body is needed with tests.pipeline": {"tests": {"pipeline": "detect", "body": ""}},
    "tracing.explain needs gateway.workers: 1": {"tracing": {"explain": "everyone"}, "gateway": {"workers": 2}},
    "redis.enabled and gateway.redis.secretName: choose one": {
        "redis": {"enabled": True}, "gateway": {"redis": {"secretName": "shared"}}
    },
    "redis.enabled needs networkPolicy.enabled": {"redis": {"enabled": True}, "networkPolicy": {"enabled": False}},
    "privateCa.configMapName and privateCa.secretName": {"privateCa": {"configMapName": "a", "secretName": "b"}},
}  # fmt: skip

Path = tuple[str, ...]


def resolved(schema: Document) -> Document:
    if "$ref" not in schema:
        return schema
    definition: Document = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return definition


def keys(values: Document, schema: Document = SCHEMA, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every key of ``values`` that the schema names, and its value."""
    for key, value in values.items():
        if "properties" in schema:
            yield (*path, key), value
            if isinstance(value, dict):
                yield from keys(value, resolved(schema["properties"][key]), (*path, key))


def schema_keys(schema: Document, path: Path = ()) -> Iterator[tuple[Path, Document]]:
    for key, inner in resolved(schema).get("properties", {}).items():
        yield (*path, key), resolved(inner)
        yield from schema_keys(inner, (*path, key))


def test_helm_applies_the_schema() -> None:
    with pytest.raises(ChartRefused) as refused:
        render_text({"strategy": {"type": "Recreat"}, "replicas": 2})
    said = str(refused.value)
    assert "- strategy.type: strategy.type must be one of the following" in said
    assert "- (root): Additional property replicas is not allowed" in said


def beyond(schema: Document) -> Iterator[Any]:
    """Yields a value that violates each constraint of the schema."""
    if "enum" in schema:
        yield "nonsense"
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "pattern" in schema:
        yield "\x00 nonsense/"
    if "maxLength" in schema:
        yield "a" * (schema["maxLength"] + 1)
    if "minItems" in schema:
        yield []
    if schema.get("type") == "array":
        yield from ([value] for value in beyond(resolved(schema["items"])))
    if "type" in schema:
        yield {"object": "text", "array": {}, "string": 1, "boolean": "true"}.get(schema["type"], "many")


def test_the_schema_rejects_every_invalid_value() -> None:
    validator = Draft7Validator(SCHEMA)
    wrong = [(path, value) for path, schema in schema_keys(SCHEMA) for value in beyond(schema)]
    for path, value in wrong:
        values = value
        for key in reversed(path):
            values = {key: values}
        places = [tuple(each.absolute_path)[: len(path)] for each in validator.iter_errors(values)]
        assert path in places, (path, value)
    assert len(wrong) > 200


@pytest.mark.parametrize("said", NEEDS)
def test_the_error_names_the_missing_values(said: str) -> None:
    with pytest.raises(ChartRefused, match=re.escape(said)):
        render_text(NEEDS[said])


def test_the_body_of_the_test_may_be_empty_without_a_pipeline() -> None:
    assert 'value: ""' in render_text({"tests": {"body": ""}})


def test_every_error_of_the_templates_has_a_case() -> None:
    assert (CHART / "templates" / "_refusals.tpl").read_text().count("{{ fail ") == len(NEEDS)


def objects(node: Any, place: Path = ()) -> Iterator[tuple[Path, Document]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield place, node
        for key, child in node.items():
            yield from objects(child, (*place, key))


def test_the_schema_is_closed_at_every_level() -> None:
    """Maps with free keys define the type of their values; objects of Kubernetes are passed through."""
    for place, schema in objects(SCHEMA):
        further = schema.get("additionalProperties")
        assert place in HANDED_ON or further is False or isinstance(further, dict), place


def test_the_schema_uses_a_draft_that_helm_supports() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"


def test_the_schema_has_exactly_the_keys_of_values_yaml() -> None:
    """Except ``enabled``, which parent charts set, and the keys that Kubernetes itself defines."""
    named = {path for path, _ in keys(VALUES)}
    in_schema = {path for path, _ in schema_keys(SCHEMA) if path[0] != "enabled"}
    besides = {path for path in in_schema - named if DEFINED_BY_KUBERNETES & set(path)}
    assert in_schema - besides == named


@pytest.mark.parametrize("path", ["/dev/shm", "/dev//shm/models", "/tmp/", "/opt/../tmp"])
def test_models_cannot_replace_a_folder_that_triton_writes_to(path: str) -> None:
    with pytest.raises(ChartRefused, match="is a folder that Triton writes to"):
        render_text({"triton": {"models": {"path": path}}})


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_parent_chart_can_disable_the_chart(tmp_path: pathlib.Path, is_enabled: bool) -> None:
    dependency = {"name": "triton-gateway", "version": "0.1.0", "condition": "triton-gateway.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    shutil.copytree(CHART, tmp_path / "charts" / "triton-gateway")
    text = render_text({"triton-gateway": {"enabled": is_enabled}}, chart=tmp_path)
    assert ("kind: Deployment" in text) is is_enabled
