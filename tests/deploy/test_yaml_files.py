"""compose.yaml, the alerts, and all delivered YAML files."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from app.settings import read_settings
from tests.conftest import Require
from tests.toolkit.programs import output_of

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OWN = ("gateway", "triton", "triton-gpu")


def test_the_gateway_reads_its_settings_and_drains_before_it_is_killed() -> None:
    settings = read_settings(SERVICES["gateway"]["environment"], {})
    assert settings.triton_url == "triton:8001"
    assert settings.triton_metrics_url == "http://triton:8002/metrics"
    assert int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > settings.drain_s


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_profile_has_one_triton_named_triton(profile: str) -> None:
    """Process 1 ignores SIGTERM as long as it has no handler, and Triton has none while it loads its models."""
    (triton,) = (each for each in SERVICES.values() if profile in each.get("profiles", []))
    assert triton["networks"]["default"]["aliases"] == ["triton"]
    assert triton["init"] is True, "Triton is not process 1"


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


def test_prometheus_and_grafana_find_the_rules_and_the_dashboard_where_they_are_mounted() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["rules.yaml"]
    assert any(mount.endswith(":/etc/prometheus/rules.yaml:ro") for mount in SERVICES["prometheus"]["volumes"])
    assert [each["job_name"] for each in config["scrape_configs"]] == ["gateway"]
    providers = ROOT / "deploy" / "grafana" / "provisioning" / "dashboards" / "triton-gateway.yaml"
    folder = yaml.safe_load(providers.read_text())["providers"][0]["options"]["path"]
    assert any(f":{folder}/dashboard.json:" in mount for mount in SERVICES["grafana"]["volumes"])


YAML_RULES = YamlLintConfig(
    "{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: disable,"
    " comments: {min-spaces-from-content: 1}, truthy: {check-keys: false}}}"
)
LONG = {"rules.yaml", "rules_test.yaml"}
"""These files may have long lines: a query on one line is easier to copy."""
FILES = [
    *ROOT.glob("deploy/**/*.yaml"),
    *(path for path in ROOT.glob("helm/**/*.yaml") if "templates" not in path.parts),
    ROOT / "gateway.yaml",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_yamllint_reports_nothing(path: Path) -> None:
    problems = [str(each) for each in linter.run(path.read_text(), YAML_RULES, str(path))]
    assert [each for each in problems if not (path.name in LONG and "line too long" in each)] == []


RULES = ROOT / "helm" / "triton-gateway" / "files" / "rules.yaml"
CASES = ROOT / "deploy" / "prometheus" / "rules_test.yaml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "--lint-fatal", RULES),
        ("check", "config", "--syntax-only", ROOT / "deploy" / "prometheus" / "prometheus.yaml"),
        ("test", "rules", CASES),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts_the_rules_the_scrape_configuration_and_every_case(
    arguments: tuple[str | Path, ...], require: Require
) -> None:
    promtool = shutil.which("promtool")
    require(promtool, "there is no promtool: Debian's package prometheus has it")
    output_of([str(promtool), *arguments])


def cases() -> Iterator[tuple[str, bool]]:
    """Yields the alert of each case, and whether it fires."""
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            yield case["alertname"], bool(case["exp_alerts"])


@pytest.mark.parametrize("fires", [True, False])
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(fires: bool) -> None:
    assert {alert for alert, does in cases() if does is fires} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_severity_and_a_link_and_waits(alert: str) -> None:
    """Two alerts do not wait: a single contract violation and a single dead process must be reported."""
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"]["runbook"] == f"docs/how-to/alerts.md#{alert.lower()}"
    assert f"\n## {alert}\n" in (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    assert alert in {"TritonGatewayContractViolated", "TritonGatewayStubDied"} or rule["for"].endswith("m")
