"""The small Redis for trials of resumable streams: its pod, its clients, and a real server with its arguments."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from app.settings import read_settings
from tests.conftest import Require
from tests.helm.rendering import Document, environment_of, gateway_container, of_kind, render
from tests.toolkit.processes import free_ports
from tests.toolkit.programs import listens, running_program

ON: Document = {"redis": {"enabled": True}}


def part(documents: list[Document], kind: str) -> Document:
    """Returns the object of this kind that belongs to Redis."""
    (found,) = (each for each in of_kind(documents, kind) if each["metadata"]["name"] == "demo-triton-gateway-redis")
    return found


def container(documents: list[Document]) -> Document:
    (found,) = part(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_without_the_value_there_is_no_redis() -> None:
    assert "redis" not in str(render()).lower()


def test_the_gateway_uses_the_redis_of_the_chart() -> None:
    documents = render(ON)
    url = read_settings(environment_of(gateway_container(documents)), {}).redis_url
    (port,) = part(documents, "Service")["spec"]["ports"]
    assert url == f"redis://{part(documents, 'Service')['metadata']['name']}:{port['port']}/0"


def test_only_the_gateway_can_connect_to_redis() -> None:
    documents = render({**ON, "networkPolicy": {"restrictEgress": True}})
    spec = part(documents, "NetworkPolicy")["spec"]
    (rule,) = spec["ingress"]
    gateway = next(
        each for each in of_kind(documents, "Deployment") if each["metadata"]["name"] == "demo-triton-gateway"
    )
    labels = gateway["spec"]["selector"]["matchLabels"]
    assert rule == {"ports": [{"port": 6379}], "from": [{"podSelector": {"matchLabels": labels}}]}
    assert (spec["policyTypes"], spec["egress"]) == (["Ingress", "Egress"], [])
    (policy,) = (each["spec"] for each in of_kind(documents, "NetworkPolicy") if each["spec"]["egress"])
    redis_labels = part(documents, "Deployment")["spec"]["selector"]["matchLabels"]
    allowed = {"ports": [{"port": 6379}], "to": [{"podSelector": {"matchLabels": redis_labels}}]}
    assert policy["egress"][-1] == allowed


@pytest.fixture
def redis(tmp_path: Path, require: Require) -> Iterator[Redis]:
    """A real Redis with the container's command, on another port and without a writable folder."""
    require(shutil.which("redis-server"), "there is no redis-server: `make system-packages` installs it")
    (port,) = free_ports(1)
    said = container(render(ON))
    assert said["args"][:2] == ["--port", "6379"]
    command = [*said["command"], "--port", str(port), *said["args"][2:]]
    with (
        running_program(command, tmp_path / "log", lambda: listens(port), cwd=tmp_path),
        Redis(port=port) as client,
    ):
        yield client
    assert [each.name for each in tmp_path.iterdir()] == ["log"], "the root file system is read-only"


def test_a_real_redis_starts_with_its_arguments(redis: Redis) -> None:
    wanted = {"maxmemory": str(128 * 2**20), "maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}
    assert {name: redis.config_get(name)[name] for name in wanted} == wanted
    assert redis.config_get("protected-mode")["protected-mode"] == "no", "clients of other pods would be refused"
    redis.set("a", "b")
