"""Routes that support streams, and access to the ports."""

import pytest

from tests.helm.rendering import Document, render, render_text, the

HOSTS = {"ingress": {"enabled": True, "hosts": ["a.example", "b.example"]}}


def annotations(values: Document) -> dict[str, str]:
    found: dict[str, str] = the(render(HOSTS | values), "Ingress")["metadata"]["annotations"]
    return found


def test_an_ingress_does_not_buffer_or_cut_streams() -> None:
    said = annotations({"shutdown": {"longestStreamSeconds": 1800}})
    assert said["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert said["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "1800"
    assert said["nginx.ingress.kubernetes.io/proxy-send-timeout"] == "1800"
    assert said["nginx.org/proxy-buffering"] == "False"
    assert said["nginx.org/proxy-read-timeout"] == said["haproxy.org/timeout-server"] == "1800s"


def test_the_controller_of_nginx_opens_websockets_of_the_service() -> None:
    documents = render(HOSTS)
    said = the(documents, "Ingress")["metadata"]["annotations"]
    assert said["nginx.org/websocket-services"] == the(documents, "Service")["metadata"]["name"]


def test_an_ingress_accepts_the_largest_body_of_any_pipeline() -> None:
    said = annotations({"gateway": {"maxBodyBytes": 1_048_576}})
    assert said["nginx.ingress.kubernetes.io/proxy-body-size"] == said["nginx.org/client-max-body-size"] == "67108864"


def test_custom_annotations_override_the_defaults() -> None:
    own = {"nginx.ingress.kubernetes.io/proxy-body-size": "1m", "a.example/b": "c"}
    said = annotations({"ingress": {**HOSTS["ingress"], "annotations": own}})
    assert own.items() <= said.items()
    assert said["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


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
