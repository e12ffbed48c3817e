"""The command line: its output, its exit status, and its message for each common mistake."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app import __version__, cli
from app.admission.keys import FollowedKeys
from app.launcher.embedded_triton import EmbeddedTriton
from app.pipelines.file import read_gateway_file
from app.process import serving as serving_module
from app.routes import DIALECTS
from tests.toolkit.triton import FakeTriton, serving

FREE_PORTS = ("--port=0", "--admin-port=0")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to an empty folder without ``gateway.yaml``, and keeps pytest's logging."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.observability.log.configure_logging", lambda level, style: None)


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_by(capsys, "--version").strip() == __version__


def test_the_help_has_every_setting_with_its_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by(capsys, "serve", "--help")
    for name in cli.Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert f"GATEWAY_{name.upper()}" in text.replace("\n", "").replace(" ", "")
    text = " ".join(text.split())
    assert "port of the API (default 8080; GATEWAY_PORT)" in text
    assert "--log-format {auto,json,text}" in text
    assert "triton-gateway serve --embedded --models my_models" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dance"], "there is no command 'dance'"),
        (["serve", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["models", "--port", "1"], "unrecognized arguments: --port 1"),
        (["serv"], "there is no command 'serv'; did you mean 'serve'?"),
        (["chek", "."], "there is no command 'chek'; did you mean 'check'?"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot 1; did you mean '--port'?"),
        (["serve", "--triton-ulr=x:1"], "; did you mean '--triton-url'?"),
        (["check", "--strikt"], "unrecognized arguments: --strikt; did you mean '--strict'?"),
    ],
)
def test_unknown_commands_and_options_get_the_usage_and_a_suggestion(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "usage: triton-gateway" in printed
    assert expected in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--triton", "http://127.0.0.1:8001/"],
            "GATEWAY_TRITON_URL is wrong: write 127.0.0.1:8001 without http://, with Triton's gRPC port, usually 8001",
        ),
        (
            ["--triton", "triton"],
            "GATEWAY_TRITON_URL is wrong: 'triton' has no port: Triton's gRPC port is usually 8001",
        ),
        (["--port", "http"], "GATEWAY_PORT is wrong: must be a whole number"),
        (["--port", "99999"], "GATEWAY_PORT is wrong: must be at most 65535"),
        (["--log-format", "jsno"], "GATEWAY_LOG_FORMAT is wrong: not an allowed value; did you mean 'json'?"),
        (["--drain-s", "-1"], "GATEWAY_DRAIN_S is wrong: must be at least 0"),
        (["--redis-url", "localhost"], "GATEWAY_REDIS_URL is wrong: must begin with redis://, rediss:// or unix://"),
        (["--models", "mine"], "--models is the repository of the embedded Triton: add --embedded\n"),
        (["--embedded", "--models", "mine"], "There is no model repository at mine."),
        (["--config", "mine.yaml"], "mine.yaml: there is no such file"),
        (["--workers=2", "--max-connections=1"], "GATEWAY_MAX_CONNECTIONS is 1: each of the 2 workers needs at least"),
    ],
)
def test_an_invalid_option_is_explained(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *FREE_PORTS, *arguments]) == 2
    assert capsys.readouterr().err.count(expected) == 1


@pytest.mark.parametrize(("setting", "extra"), [("redis-url=redis://r", "redis"), ("otlp-endpoint=http://o", "otel")])
def test_a_missing_extra_is_status_2(
    setting: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_module, "find_spec", lambda name: None)
    assert cli.main(["serve", f"--{setting}", *FREE_PORTS]) == 2
    assert f"needs the extra `{extra}`: pip install '.[{extra}]'" in capsys.readouterr().err


def test_invalid_settings_are_a_json_line_in_the_json_log() -> None:
    """Runs a new process, because the tests do not change the log of their own process."""
    environment = os.environ | {"GATEWAY_PROT": "1", "GATEWAY_LOG_FORMAT": "json"}
    program = "from app.cli import main; raise SystemExit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["level"] == "ERROR"
    assert "did you mean GATEWAY_PORT?" in json.loads(line)["message"]


@pytest.mark.parametrize(
    ("flags", "value"),
    [(["--explain"], "true"), (["--explain", "false"], "false"), (["--no-explain"], "false"), ([], None)],
)
def test_a_switch_whose_default_depends_on_others_has_three_forms(flags: list[str], value: str | None) -> None:
    assert cli.command_parser().parse_args(["serve", *flags]).explain == value


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


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "keys.yaml: there is no such file"),
        ("keys:\n  - id: a\n    sha: x\n", "keys.yaml:3: keys.0.sha is not a known key; did you mean 'sha256'?"),
    ],
)
def test_a_missing_or_invalid_file_of_keys_is_status_2(
    workers: str, text: str | None, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "keys.yaml").write_text(text)
    assert cli.main(["serve", "--api-keys-file=keys.yaml", "--workers", workers, *FREE_PORTS]) == 2
    assert expected in capsys.readouterr().err


def test_two_taken_ports_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(each.getsockname()[1]) for each in (one, other)]
        assert cli.main(["serve", f"--port={ports[0]}", f"--admin-port={ports[1]}"]) == 2
        first, second, hint = capsys.readouterr().err.splitlines()
        assert first == f"triton-gateway: GATEWAY_PORT: cannot listen on 127.0.0.1:{ports[0]}: Address already in use"
        assert second == f"GATEWAY_ADMIN_PORT: cannot listen on 127.0.0.1:{ports[1]}: Address already in use"
        assert hint.startswith("Stop the other process, or use other ports: --port ")
        assert " --admin-port " in hint
        assert cli.main(["serve", "--port=0", f"--admin-port={ports[1]}"]) == 2
    first, _ = capsys.readouterr().err.splitlines()
    assert first == f"triton-gateway: GATEWAY_ADMIN_PORT: cannot listen on 127.0.0.1:{ports[1]}: Address already in use"


def test_equal_ports_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port=7000", "--admin-port=7000"]) == 2
    said = "triton-gateway: GATEWAY_PORT and GATEWAY_ADMIN_PORT are both 7000: two ports are needed\n"
    assert capsys.readouterr().err == said


def test_models_without_a_running_triton_is_status_2(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variables of Kubernetes for a Service are no settings, and named in the log."""
    monkeypatch.setenv("GATEWAY_SERVICE_HOST", "10.0.0.1")
    assert cli.main(["models", "--triton", "127.0.0.1:1"]) == 2
    assert "Nothing answers at 127.0.0.1:1 (gRPC). Is it Triton's gRPC port, usually 8001?" in capsys.readouterr().err
    assert any(getattr(record, "variables", None) == ["GATEWAY_SERVICE_HOST"] for record in caplog.records)


async def test_models_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeTriton(ready={"ocr": "READY", "broken": "UNAVAILABLE"})) as triton:
        await cli.show_models(cli.Settings(triton_url=triton.url))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert any("ocr" in row and "python" in row and "yes" in row for row in rows)
    assert any("broken" in row and "no" in row for row in rows)


class TestNewKey:
    def test_standard_output_has_the_key_and_the_entries_make_a_file(self, tmp_path: Path) -> None:
        """Also the first entry, in a file that is empty."""
        for key_id in ("team-a", "b"):
            with (tmp_path / "keys.yaml").open("ab") as file:
                command = [sys.executable, "-m", "app.cli", "key", "new", key_id]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=file, text=True).stdout
            key = printed.removesuffix("\n")
            assert key.startswith("tgw_")
            assert key not in (tmp_path / "keys.yaml").read_text()
            keys = FollowedKeys(tmp_path / "keys.yaml", DIALECTS)
            assert keys.key_of(key.encode(), 0.0).id == key_id
        assert [key.id for key in keys.keys] == ["team-a", "b"]

    @pytest.mark.parametrize("key_id", ["team a", "", "a\nb", "tgw_0123456789"])
    def test_an_invalid_id_is_an_error(self, key_id: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["key", "new", key_id]) == cli.UNUSABLE
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "the id is wrong" in printed.err


class TestInit:
    @pytest.mark.parametrize("name", ["", "models", "my models"])
    def test_the_starter_has_no_findings(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
        """In an empty folder, and in new ones. The next steps quote the folder."""
        folder = tmp_path / name
        assert cli.main(["init", str(folder)]) == 0
        quoted = shlex.quote(str(folder))
        assert capsys.readouterr().out.endswith(f"  triton-gateway serve --embedded --models {quoted}\n")
        assert sorted(path.name for path in folder.iterdir()) == [
            *("README.md", "clean_text", "count_words", "gateway.yaml", "stream_words", "text_report")
        ]
        assert cli.main(["check", str(folder), "--strict"]) == 0
        assert capsys.readouterr().out == "4 models, 3 pipelines: no findings\n"

    def test_a_folder_with_files_is_not_changed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine").touch()
        assert cli.main(["init", str(tmp_path)]) == 2
        assert capsys.readouterr().err == (
            f"triton-gateway: {tmp_path} already exists and is not empty: name a new folder, nothing was written.\n"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    @pytest.mark.parametrize("path", ["link", "file/models"])
    def test_it_needs_a_folder_that_it_can_write(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
    ) -> None:
        (tmp_path / "link").symlink_to("nowhere")
        (tmp_path / "file").touch()
        assert cli.main(["init", str(tmp_path / path)]) == 2
        assert f"{path} cannot be written" in capsys.readouterr().err
        assert {each.name for each in tmp_path.iterdir()} == {"link", "file"}

    def test_the_reference_models_of_a_triton_get_pipelines_that_compile(
        self, triton: EmbeddedTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["init", str(tmp_path), "--triton", triton.grpc_url]) == 0
        assert f"triton-gateway serve --triton {triton.grpc_url}" in capsys.readouterr().out
        config = tmp_path / "gateway.yaml"
        assert cli.main(["check", "--triton", triton.grpc_url, "--config", str(config)]) in {0, 1}
        names = list(read_gateway_file(config).spec.pipelines)
        assert "ocr_ensemble" in names
        assert "text_detect" not in names
