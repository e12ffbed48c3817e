"""``triton-gateway check``: its output and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
from tests.toolkit.broken_repositories import BROKEN


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Checks a broken repository. Returns the exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def checked(code: str, *flags: str) -> tuple[int, str, str]:
        BROKEN[code].write(tmp_path)
        status = main(["check", "models", *flags])
        return (status, *capsys.readouterr())

    return checked


def test_an_error_is_status_1(checked) -> None:
    status, output, _ = checked("cycle")
    assert status == 1
    assert output.splitlines()[0] == "6 models, no gateway.yaml: 1 error"


@pytest.mark.parametrize("flags", [(), ("--strict",)])
def test_a_warning_is_status_0_unless_strict(checked, flags: tuple[str, ...]) -> None:
    assert checked("unordered-stream", *flags)[0] == len(flags)


@pytest.mark.parametrize("code", ["unknown-edge", "batches-of-one"])
def test_unknown_findings_and_hints_are_not_failures_with_strict(checked, code: str) -> None:
    flags = ["--config", "gateway.yaml"] if BROKEN[code].gateway else []
    status, output, _ = checked(code, "--strict", *flags)
    assert (status, output.count(code)) == (0, 1)


def test_the_summary_counts_models_and_pipelines(pytestconfig: pytest.Config, monkeypatch, capsys) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)
    assert main(["check"]) == 0
    assert capsys.readouterr().out == "22 models, 10 pipelines: no findings\n"


def test_only_the_gateway_yaml_of_the_models_is_checked(checked, capsys) -> None:
    assert ": pipelines.broken" not in checked("gateway-yaml")[1]
    Path("gateway.yaml").rename("models/gateway.yaml")
    assert main(["check", "models"]) == 1
    assert "models/gateway.yaml:4: pipelines.broken.outputs.answer.tensor" in capsys.readouterr().out
    Path("models").rename("triton_models")
    Path("triton_models/gateway.yaml").rename("gateway.yaml")
    assert main(["check"]) == 1
    assert " gateway.yaml:4: pipelines.broken.outputs.answer.tensor" in capsys.readouterr().out


def test_the_json_format(checked) -> None:
    status, output, _ = checked("unwritten-tensor", "--format", "json")
    report = json.loads(output)
    (finding,) = report.pop("findings")
    assert status == 1
    assert report == {"models": 6, "pipelines": None}
    assert finding["text"].startswith("no step writes 'mit'")
    assert {key: finding[key] for key in finding if key != "text"} == {
        "severity": "error",
        "code": "unwritten-tensor",
        "model": "broken",
        "step": 2,
        "tensor": "mit",
        "page": "docs/reference/checks.md#unwritten-tensor",
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent"], "There is no model repository at absent."),
        (["models", "--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--triton", "127.0.0.1:9"], "Nothing answers at 127.0.0.1:9 (gRPC). Is it Triton's gRPC port, usually 8001?"),
    ],
)
def test_a_failed_check_is_status_2(checked, capsys, arguments: list[str], expected: str) -> None:
    checked("cycle")
    assert main(["check", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_running_triton_is_checked_with_the_settings_of_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEWAY_TRITON_CA", str(tmp_path / "no.pem"))
    assert main(["check", "--triton", "127.0.0.1:9"]) == 2
    assert "no.pem: cannot be read" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_is_the_only_finding(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "demo"]) == 0
    Path("demo/count_words/config.pbtxt").write_text("input [ {")
    capsys.readouterr()
    assert main(["check", "demo"]) == 1
    summary, *findings = capsys.readouterr().out.splitlines()
    assert summary == "4 models, 3 pipelines: 1 error"
    assert [line.split()[:2] for line in findings if line.strip()] == [["error", "unreadable-config"]]


def test_a_reader_that_closes_the_pipe_early_changes_nothing(tmp_path: Path) -> None:
    BROKEN["cycle"].write(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "app.cli", "check", str(tmp_path / "models")]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")
