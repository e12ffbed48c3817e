"""compose.yaml: mounted files exist, the gateway reads all variables, and the containers are restricted."""

from pathlib import Path

import pytest
import yaml

from app.settings import read_settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OWN = ("gateway", "triton", "triton-gpu")


def test_the_gateway_reads_its_settings() -> None:
    settings = read_settings(SERVICES["gateway"]["environment"], {})
    assert settings.triton_url == "triton:8001"
    assert settings.triton_metrics_url == "http://triton:8002/metrics"


def test_the_stop_grace_period_exceeds_the_drain() -> None:
    drain_s = read_settings(SERVICES["gateway"]["environment"], {}).drain_s
    assert int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > drain_s


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_profile_has_one_triton_named_triton(profile: str) -> None:
    (triton,) = (each for each in SERVICES.values() if profile in each.get("profiles", []))
    assert triton["networks"]["default"]["aliases"] == ["triton"]


@pytest.mark.parametrize("name", ["triton", "triton-gpu"])
def test_triton_is_not_process_1(name: str) -> None:
    """Process 1 ignores SIGTERM as long as it has no handler, and Triton has none while it loads its models."""
    assert SERVICES[name]["init"] is True


@pytest.mark.parametrize("name", OWN)
def test_own_images_run_read_only_without_capabilities(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["build"]["target"] in (ROOT / "Dockerfile").read_text()


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for each in SERVICES.values() for port in each.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_mounted_file_exists() -> None:
    mounted = [mount.split(":")[0] for each in SERVICES.values() for mount in each.get("volumes", [])]
    missing = [each for each in mounted if each.startswith(".") and not (ROOT / "deploy" / each).exists()]
    assert missing == []


def test_prometheus_finds_the_rules_where_they_are_mounted() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["rules.yaml"]
    assert any(mount.endswith(":/etc/prometheus/rules.yaml:ro") for mount in SERVICES["prometheus"]["volumes"])
    assert [each["job_name"] for each in config["scrape_configs"]] == ["gateway"]


def test_grafana_finds_the_dashboard_where_it_is_mounted() -> None:
    providers = ROOT / "deploy" / "grafana" / "provisioning" / "dashboards" / "triton-gateway.yaml"
    folder = yaml.safe_load(providers.read_text())["providers"][0]["options"]["path"]
    assert any(f":{folder}/dashboard.json:" in mount for mount in SERVICES["grafana"]["volumes"])
