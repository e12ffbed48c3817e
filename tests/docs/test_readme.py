"""The commands of README.md work as printed, in a folder that looks like the checkout."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.cli import STARTER
from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.docs.walkthrough import START_S, Server
from tests.toolkit.processes import free_ports, live_triton
from tests.toolkit.programs import environment_without_proxies, output_of

MAKE = "make run"
TRITON = "127.0.0.1:8001"
BLOCKS = blocks_of(ROOT / "README.md")
COMMANDS = [text for language, text in BLOCKS if language == "sh"]
foreign = live_triton(lambda folder: shutil.copytree(STARTER, folder, dirs_exist_ok=True))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with links to all files of the checkout, so that commands write no files into the checkout."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def block_with(text: str) -> str:
    (block,) = [command for command in COMMANDS if text in command]
    return block


def run_in(folder: Path, command: str) -> str:
    return output_of(["bash", "-euo", "pipefail", "-c", command], folder, environment=environment_without_proxies())


@contextmanager
def served_by(folder: Path, command: str) -> Iterator[str]:
    """Yields the address of a gateway that the command starts. Stops the gateway with Ctrl-C."""
    ports = free_ports(2)
    server = Server.started(command, ports, folder, folder / "log", environment_without_proxies())
    try:
        server.wait_until_ready()
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        server.press_ctrl_c()
        server.process.wait(START_S)


def pipelines_of(url: str) -> set[str]:
    return {each["name"] for each in httpx.get(f"{url}/v1/pipelines").json()["pipelines"]}


@pytest.mark.usefixtures("models_venv")
@pytest.mark.full
def test_make_run_serves_the_reference_pipelines(checkout: Path) -> None:
    (command,) = [each for each in COMMANDS if each.strip() == MAKE]
    with served_by(checkout, command) as url:
        assert {"ocr", "insights", "write"} <= pipelines_of(url)


@pytest.mark.usefixtures("models_venv")
def test_the_starter_is_written_checked_and_served(checkout: Path, require: Require) -> None:
    """The working directory has another gateway.yaml. The requests of the README in the folder work too."""
    require(shutil.which("curl"), "curl is not installed")
    with served_by(checkout, block_with("triton-gateway init my_models")) as url:
        names = pipelines_of(url)
        answer = httpx.post(f"{url}/v1/pipelines/report", json={"text": "two words"}, timeout=30)
        (_, requests) = [text for language, text in blocks_of(checkout / "my_models" / "README.md") if language == "sh"]
        printed = run_in(checkout, requests.replace("http://127.0.0.1:8080", url))
    assert names == {"count", "report", "words"}
    assert answer.json() == {"count": 2, "longest": "words", "early_exit": None}
    assert '"early_exit":"no_text"' in printed
    assert (printed.count("event: output"), printed.count("event: done")) == (5, 1)
    assert "no findings" in (checkout / "log").read_text()


def test_the_commands_for_a_running_triton_work_with_models_of_the_user(
    checkout: Path, foreign: EmbeddedTriton
) -> None:
    """The working directory has the gateway.yaml of the reference models, which this Triton does not have."""
    printed = run_in(checkout, block_with("triton-gateway models").replace(TRITON, foreign.grpc_url))
    assert "text_report" in printed
    assert "no gateway.yaml: no findings" in printed
    assert "mine/gateway.yaml has " in printed
    (command,) = [line for _, text in BLOCKS for line in text.splitlines() if line.endswith("serve --triton HOST:8001")]
    with served_by(checkout, command.replace("HOST:8001", foreign.grpc_url)) as url:
        assert {"clean_text", "text_report"} <= pipelines_of(url)
    assert "gateway.yaml: none; serving every ready model" in (checkout / "log").read_text()
    (command,) = [line.strip() for line in printed.splitlines() if "triton-gateway serve --triton" in line]
    with served_by(checkout, f".venv/bin/{command}") as url:
        assert pipelines_of(url) == {"text_report", "stream_words"}


def test_every_command_is_run_by_a_test() -> None:
    """tests/live/test_documented_commands.py runs the commands that contain the gateway's address."""
    here = {MAKE, block_with("triton-gateway init my_models").strip(), block_with("triton-gateway models").strip()}
    assert [text for text in COMMANDS if "http://127.0.0.1:808" not in text and text.strip() not in here] == []
