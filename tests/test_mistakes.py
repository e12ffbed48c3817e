"""Common mistakes of new users, and the command line's message for each."""

import socket
from pathlib import Path

import pytest

from app import cli
from app.settings import is_service_link


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "configure_logging", lambda level, style: None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serv"], "there is no command 'serv'; did you mean 'serve'?"),
        (["chek", "."], "there is no command 'chek'; did you mean 'check'?"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot 1; did you mean '--port'?"),
        (["serve", "--triton-ulr=x:1"], "; did you mean '--triton-url'?"),
        (["check", "--strikt"], "unrecognized arguments: --strikt; did you mean '--strict'?"),
    ],
)
def test_a_mistyped_command_or_option_gets_a_suggestion(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


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
        (["--models", "mine"], "--models is the repository of the embedded Triton: add --embedded"),
        (["--embedded", "--models", "mine"], "There is no model repository at mine."),
        (["--config", "mine.yaml"], "mine.yaml: cannot be read: [Errno 2] No such file or directory"),
    ],
)
def test_an_invalid_option_is_explained(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port=0", "--admin-port=0", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_mistake_in_the_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gateway.yaml").write_text("pipelines:\n  p:\n    model: m\n    modle: m\n")
    assert cli.main(["serve", "--port=0", "--admin-port=0"]) == 2
    expected = "gateway.yaml:4: pipelines.p.modle is not a known key; did you mean 'model'?"
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


def test_the_help_has_defaults_choices_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "port of the API (default 8080; GATEWAY_PORT)" in text
    assert "--log-format {auto,json,text}" in text
    assert "triton-gateway serve --embedded --models my_models" in text


def test_variables_of_kubernetes_itself_cause_no_warning() -> None:
    found = [is_service_link(f"{name}_PORT", "tcp://10.0.0.1:80") for name in ("KUBERNETES", "REDIS", "GATEWAY")]
    assert found == [False, False, True]
