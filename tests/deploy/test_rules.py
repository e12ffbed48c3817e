"""The alerts pass promtool; each has a case that fires, a case that does not, and instructions."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import Require

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm" / "triton-gateway" / "files" / "rules.yaml"
CASES = ROOT / "deploy" / "prometheus" / "rules_test.yaml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


@pytest.fixture(scope="module")
def promtool(require: Require) -> str:
    found = shutil.which("promtool")
    require(found, "there is no promtool: Debian's package prometheus has it")
    return str(found)


def test_promtool_accepts_the_rules(promtool: str) -> None:
    subprocess.run([promtool, "check", "rules", "--lint-fatal", str(RULES)], check=True, capture_output=True)


def test_promtool_accepts_the_scrape_configuration(promtool: str) -> None:
    config = ROOT / "deploy" / "prometheus" / "prometheus.yaml"
    subprocess.run([promtool, "check", "config", "--syntax-only", str(config)], check=True, capture_output=True)


def test_every_case_passes(promtool: str) -> None:
    done = subprocess.run([promtool, "test", "rules", str(CASES)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def cases() -> Iterator[tuple[str, bool]]:
    """Yields the alert of each case, and whether it fires."""
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            yield case["alertname"], bool(case["exp_alerts"])


@pytest.mark.parametrize("fires", [True, False])
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(fires: bool) -> None:
    assert {alert for alert, does in cases() if does is fires} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_severity_and_a_link(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"]["runbook"] == f"docs/how-to/alerts.md#{alert.lower()}"
    assert f"\n## {alert}\n" in (ROOT / "docs" / "how-to" / "alerts.md").read_text()


@pytest.mark.parametrize("alert", sorted(set(ALERTS) - {"TritonGatewayContractViolated", "TritonGatewayStubDied"}))
def test_no_alert_fires_on_one_bad_sample(alert: str) -> None:
    """Two alerts are exceptions: a single contract violation and a single dead process must be reported."""
    assert ALERTS[alert]["for"].endswith("m")
