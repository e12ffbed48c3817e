"""The command line: its output, and its exit status if a setting or a file is invalid."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app import __version__, cli
from app.admission.keys import key_of, read_keys
from app.process import serving as serving_module
from app.routes import DIALECTS
from tests.toolkit.triton import FakeTriton, serving

FREE_PORTS = ("--port=0", "--admin-port=0")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to an empty folder without ``gateway.yaml``, and keeps pytest's logging."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "configure_logging", lambda level, style: None)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("arguments", [[], ["dance"], ["serve", "--nonsense"], ["models", "--port", "1"]])
def test_unknown_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: triton-gateway" in capsys.readouterr().err


def test_every_setting_is_a_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in cli.Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert f"GATEWAY_{name.upper()}" in text.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(("setting", "extra"), [("redis-url=redis://r", "redis"), ("otlp-endpoint=http://o", "otel")])
def test_a_missing_extra_is_status_2(
    setting: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_module, "find_spec", lambda name: None)
    assert cli.main(["serve", f"--{setting}", *FREE_PORTS]) == 2
    assert f"needs the extra `{extra}`: pip install '.[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("GATEWAY_PROT", "1", "did you mean GATEWAY_PORT?"), ("GATEWAY_PORT", "x", "GATEWAY_PORT is wrong")],
)
def test_invalid_settings_are_status_2(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["serve"]) == 2
    assert expected in capsys.readouterr().err


def test_invalid_settings_are_a_json_line_in_the_json_log() -> None:
    """Runs a new process, because the tests do not change the log of their own process."""
    environment = os.environ | {"GATEWAY_PROT": "1", "GATEWAY_LOG_FORMAT": "json"}
    program = "from app.cli import main; raise SystemExit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["level"] == "ERROR"
    assert "did you mean GATEWAY_PORT?" in json.loads(line)["message"]


def test_models_without_embedded_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--models", "mine"]) == 2
    assert capsys.readouterr().err.endswith("is the repository of the embedded Triton: add --embedded\n")


def test_an_invalid_file_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.yaml").write_text("pipelines: {p: {modle: m}}\n")
    assert cli.main(["serve", "--config", "wrong.yaml", *FREE_PORTS]) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err


def test_serve_can_check_its_files_without_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Needs neither free ports nor Triton."""
    config, keys = tmp_path / "checked.yaml", tmp_path / "keys.yaml"
    config.write_text("pipelines: {p: {model: m}}\n")
    keys.write_text("kays: []\n")
    command = ["serve", "--check", "--port=1", f"--config={config}"]
    assert cli.main(command) == 0
    assert cli.main([*command, f"--api-keys-file={keys}"]) == 2
    assert "keys.yaml" in capsys.readouterr().err
    config.write_text("pipelines: {p: {modle: m}}\n")
    assert cli.main(command) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["port", "admin_port"])
def test_a_taken_port_is_reported_with_the_settings_name(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = {"port": "0", "admin_port": "0"} | {setting: port}
        status = cli.main(["serve", *(f"--{name.replace('_', '-')}={value}" for name, value in ports.items())])
    assert status == 2
    assert f"GATEWAY_{setting.upper()}: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_settings_unusable_for_workers_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--workers=2", "--max-connections=1", *FREE_PORTS]) == 2
    assert capsys.readouterr().err.count("GATEWAY_MAX_CONNECTIONS is 1: each of the 2 workers needs at least 1") == 1


def test_models_without_a_running_triton_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--triton", "127.0.0.1:1"]) == 2
    assert "Nothing answers at 127.0.0.1:1 (gRPC). Is it Triton's gRPC port, usually 8001?" in capsys.readouterr().err


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with serving(FakeTriton(ready={"ocr": "READY", "broken": "UNAVAILABLE"})) as server:
        yield server


async def test_models_prints_a_table(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    await cli.show_models(cli.Settings(triton_url=triton.url))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any("ocr" in row and "python" in row and "yes" in row for row in rows)
    assert any("broken" in row and "no" in row for row in rows)


def test_service_links_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GATEWAY_SERVICE_HOST", "10.0.0.1")
    cli.main(["models", "--triton", "127.0.0.1:1"])
    assert any(getattr(record, "variables", None) == ["GATEWAY_SERVICE_HOST"] for record in caplog.records)


class TestNewKey:
    def test_standard_output_has_only_the_key(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert cli.main(["key", "new", "team-a"]) == 0
        printed = capsys.readouterr()
        key = printed.out.removesuffix("\n")
        assert key.startswith("tgw_")
        assert key not in printed.err
        (tmp_path / "keys.yaml").write_text(f"keys:\n{printed.err}")
        assert key_of(read_keys(tmp_path / "keys.yaml", DIALECTS), key.encode(), 0.0).caller.id == "team-a"

    def test_an_entry_can_be_appended_to_the_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        entries = ""
        for key_id in ("a", "b"):
            cli.main(["key", "new", key_id])
            entries += capsys.readouterr().err
        (tmp_path / "keys.yaml").write_text(f"keys:\n{entries}")
        assert [key.caller.id for key in read_keys(tmp_path / "keys.yaml", DIALECTS)] == ["a", "b"]

    @pytest.mark.parametrize("key_id", ["team a", "", "a\nb", "tgw_0123456789"])
    def test_an_invalid_id_is_an_error(self, key_id: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["key", "new", key_id]) == cli.UNUSABLE
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "the id is wrong" in printed.err


class TestKeysFile:
    @pytest.mark.parametrize("workers", ["1", "2"])
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (None, "keys.yaml: cannot be read"),
            ("keys:\n  - id: a\n    sha: x\n", "keys.yaml:3: keys.0.sha is not a known key; did you mean 'sha256'?"),
        ],
    )
    def test_a_missing_or_invalid_file_is_status_2(
        self, workers: str, text: str | None, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        if text is not None:
            (tmp_path / "keys.yaml").write_text(text)
        assert cli.main(["serve", "--api-keys-file=keys.yaml", "--workers", workers, *FREE_PORTS]) == cli.UNUSABLE
        assert expected in capsys.readouterr().err
