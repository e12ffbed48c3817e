"""The files of a deployment without Kubernetes: the Dockerfile without a build, compose.yaml, alerts, and all YAML."""

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from app.settings import read_settings
from tests.conftest import Require
from tests.toolkit.programs import output_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def stages() -> dict[str, str]:
    """Returns the text of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-fail", ROOT / "Dockerfile"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_the_base_image_is_the_first_argument_and_the_gateway_the_last_stage() -> None:
    instructions = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    assert instructions[0].startswith("ARG BASE_IMAGE=")
    assert list(stages())[-1] == "gateway", "a build without a target creates the last stage"


@pytest.mark.parametrize("stage", ["gateway", "triton"])
def test_the_image_runs_as_an_unprivileged_user_without_a_shell_and_has_labels(stage: str) -> None:
    text = stages()[stage]
    user = re.search(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user is not None
    assert int(user[1]) >= 10001
    assert "RUN" not in text
    assert all(each.startswith("[") for each in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE))
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", text))
    assert {"title", "description", "version", "revision"} <= labels


@pytest.mark.parametrize(("port", "status"), [("0", 1), ("given", 0)])
def test_the_health_check_asks_the_admin_port(port: str, status: int) -> None:
    (found,) = re.findall(r"^HEALTHCHECK .*? CMD (\[.*?\])$", stages()["gateway"], re.MULTILINE | re.DOTALL)
    _, flag, script = json.loads(found.replace("\\\n", ""))
    with HTTPServer(("127.0.0.1", 0), Live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = {"GATEWAY_ADMIN_PORT": str(server.server_port) if port == "given" else port}
        done = subprocess.run([sys.executable, flag, script], env=given, capture_output=True, check=False)
        server.shutdown()
    assert done.returncode == status


class Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health/live" else 404)
        self.end_headers()


def test_every_package_is_locked_by_its_hash() -> None:
    installs = re.findall(r"pip (?:--python \S+ )?install.*?(?=&&|\n(?! ))", DOCKERFILE, re.DOTALL)
    assert len(installs) == 4
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)


def test_a_pth_file_names_the_folder_of_the_models_packages() -> None:
    """Before Triton 24.11, model processes ignore PYTHONPATH."""
    (folder,) = re.findall(r"--target (\S+)", stages()["triton-packages"])
    lines = re.findall(r'echo "(.+)" > "\$folder/model-packages\.pth"', DOCKERFILE)
    assert lines == [f"import sys; sys.path.insert(0, '{folder}')"]


def test_the_copied_files_match_the_build_context() -> None:
    copied = {
        source.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    included = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert IGNORED[1] == "*"
    assert copied == included
    assert all((ROOT / name).exists() for name in included)


def test_each_optional_package_of_the_image_is_locked_and_known() -> None:
    """The build deletes the lines of a package that is not in EXTRAS."""
    (names,) = re.findall(r"^RUN for extra in (.*); do", stages()["build"], re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    locked = (ROOT / "requirements" / "gateway.txt").read_text()
    (default,) = re.findall(r'^ARG EXTRAS="(.*)"$', stages()["build"], re.MULTILINE)
    assert set(default.split()) == set(names.split())
    for name in names.split():
        assert [re.split("[>=]", each)[0] for each in extras[name]] == [name]
        assert len(re.findall(f"^{name}==", locked, re.MULTILINE)) == 1


def test_packages_without_their_symbols_still_work(tmp_path: Path) -> None:
    """The libraries of compilers, linkers and of tools that change them afterwards: C, C++, Rust and Fortran."""
    names = ("numpy", "numpy.libs", "ml_dtypes", "uvloop", "yaml", "orjson", "_yaml")
    for name in names:
        source = Path(numpy.__file__).parents[1] / name
        if source.exists():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    before = size_of(tmp_path)
    subprocess.run([sys.executable, ROOT / "requirements" / "slim.py", tmp_path], check=True)
    assert size_of(tmp_path) < 0.65 * before
    assert not list(tmp_path.rglob("tests"))
    assert not list(tmp_path.rglob("*.pyi"))
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import ml_dtypes, numpy, orjson, uvloop, yaml
for module in (ml_dtypes, numpy, orjson, uvloop, yaml):
    assert module.__file__.startswith({str(tmp_path)!r}), module
matrix = numpy.random.default_rng(0).random((50, 50))
assert numpy.allclose(numpy.linalg.inv(matrix) @ matrix, numpy.eye(50))
assert numpy.fft.ifft(numpy.fft.fft(matrix)).real.shape == (50, 50)
assert orjson.loads(orjson.dumps(numpy.array([1.5]).astype(ml_dtypes.bfloat16).astype(float).tolist())) == [1.5]
try:
    yaml.load("[", yaml.CSafeLoader)
except yaml.YAMLError:
    pass

async def answer():
    return 7

assert uvloop.run(answer()) == 7
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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
