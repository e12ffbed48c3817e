"""README, the tutorials and recipes work as printed: files, commands and answers with the real Triton.

The commands of README run in a folder that looks like the checkout.

Every code block of the documentation is run by a test, or has a fence that marks it as output or as a fragment. A test
must run every block whose fence has a language in ``LANGUAGES``. Commands that no test can run, such as commands for a
cluster, have a fence without a language; output has ``text``.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from jsonschema import Draft7Validator
from pydantic import TypeAdapter

from app.admission.keys import read_keys
from app.cli import STARTER, main
from app.core.errors import UpstreamError
from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions, Ports
from app.pipelines.file import read_gateway_file
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.spec import ContractSpec, EarlyExitRule, ErrorMatch
from app.process.tritons import run_triton
from app.routes import DIALECTS
from app.settings import Settings
from tests.conftest import Require
from tests.docs.pages import ALL_PAGES, ROOT, blocks_of
from tests.docs.walkthrough import START_S, Reader, Server, blocks_after
from tests.live.test_documented_commands import commands, snippets
from tests.toolkit.processes import GatewayProcess, StartGateway, free_ports, live_triton, running_triton
from tests.toolkit.programs import environment_without_proxies, output_of
from tests.zoo.kinds import BY_NAME
from tests.zoo.repository import write_models

MAKE = "make run"
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
    printed = run_in(checkout, block_with("triton-gateway models").replace("127.0.0.1:8001", foreign.grpc_url))
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


def test_your_triton_in_five_minutes_works_as_printed(
    tmp_path: Path, foreign: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    page = blocks_of(ROOT / "docs/how-to/existing-triton.md")
    texts = [text.replace("127.0.0.1:8001", foreign.grpc_url) for language, text in page if language == "sh"]
    started, written, declared = (text.strip().splitlines() for text in texts)
    assert "4 models, no gateway.yaml: no findings" in run_in(tmp_path, "\n".join(started[:-1]))
    with served_by(tmp_path, started[-1]) as url:
        assert pipelines_of(url) == {"clean_text", "count_words", "stream_words", "text_report"}
    run_in(tmp_path, *written)
    assert "4 models, 2 pipelines: no findings" in run_in(tmp_path, *declared[:-1])
    with served_by(tmp_path, declared[-1]) as url:
        assert pipelines_of(url) == {"text_report", "stream_words"}


def test_every_command_is_run_by_a_test() -> None:
    """tests/live/test_documented_commands.py runs the commands that contain the gateway's address."""
    here = {MAKE, block_with("triton-gateway init my_models").strip(), block_with("triton-gateway models").strip()}
    assert [text for text in COMMANDS if "http://127.0.0.1:808" not in text and text.strip() not in here] == []


TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.usefixtures("models_venv")
def test_own_ensemble_works_as_printed(tmp_path: Path, require: Require) -> None:
    require(shutil.which("curl"), "there is no curl")
    folder = tmp_path / "colours"
    folder.mkdir()
    assert Reader(folder).follow(blocks_after(TUTORIALS / "own-ensemble.md", "A Python model")) == [0]


def test_llm_of_your_triton_works_as_printed(tmp_path: Path, models_venv: Path, require: Require) -> None:
    """With a stand-in of the vLLM backend: the Triton of the tests has none."""
    require(shutil.which("curl"), "there is no curl")
    write_models(tmp_path / "stand_in", [replace(BY_NAME["vllm"], name="llama")])
    tokenizer = tmp_path / "folder" / "weights" / "llama"
    tokenizer.mkdir(parents=True)
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with running_triton(EmbeddedOptions(tmp_path / "stand_in", models_venv)) as triton:
        reader = Reader(tmp_path / "folder", {"127.0.0.1:8001": triton.grpc_url})
        assert reader.follow(blocks_after(TUTORIALS / "llm-of-your-triton.md", "A model folder")) == [0] * 2


def test_speak_to_your_triton_works_as_printed(tmp_path: Path, gateway: GatewayProcess, require: Require) -> None:
    require(shutil.which("curl"), "there is no curl")
    for name in ("samples", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    reader = Reader(tmp_path, {"127.0.0.1:8080": gateway.url.removeprefix("http://")})
    blocks = blocks_after(TUTORIALS / "speak-to-your-triton.md", "With curl")
    assert [each.language for each in blocks] == ["sh", "text", "python", "sh", "text"]
    reader.follow(blocks)


@pytest.mark.full
async def test_standalone_triton_works_as_documented(
    models_venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # `init` writes the log of its process
    models, ports = tmp_path / "models", Ports.free()
    assert await asyncio.to_thread(main, ["init", str(models)]) == 0
    running = asyncio.create_task(run_triton(Settings(embedded_repository=models, embedded_venv=models_venv), ports))
    url = f"http://127.0.0.1:{ports.http}/v2/models/text_report/ready"
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    await asyncio.to_thread(follow_page, tmp_path, models, f"127.0.0.1:{ports.grpc}")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(url)


def follow_page(folder: Path, models: Path, triton: str) -> None:
    working = folder / "working"
    working.mkdir()
    (working / "my_models").symlink_to(models)
    blocks = blocks_after(ROOT / "docs" / "how-to" / "standalone-triton.md", "The gateway in front of it")
    assert Reader(working, {"127.0.0.1:8001": triton}).follow(blocks) == [0]


def test_the_browser_tutorial_shows_its_page() -> None:
    page = (TUTORIALS / "llm_in_a_browser" / "write.html").read_text()
    shown = [text for language, text in blocks_of(TUTORIALS / "llm-in-a-browser.md") if language == "js"]
    assert len(shown) > 3
    assert [text for text in shown if text not in page] == []


KEY = "a key of sixteen bytes"
REQUEST = SimpleNamespace(request_id=lambda: "5d29")


class TritonError(Exception):
    """The part of the Python backend's error that the recipes use: a message and a code."""

    ALREADY_EXISTS = "ALREADY_EXISTS"

    def __init__(self, message: str, code: str) -> None:
        self.upstream = UpstreamError(code, f"in ensemble 'outer', {message}")


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The definitions in the Python blocks of docs/explanation/early-exit.md."""
    backend = SimpleNamespace(TritonError=TritonError, InferenceResponse=lambda error: error)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    monkeypatch.setenv("EARLY_EXIT_KEY", KEY)
    defined: dict[str, object] = {}
    for language, text in blocks_of(ROOT / "docs" / "explanation" / "early-exit.md"):
        if language == "python":
            exec(text, defined)
    return defined


def reason_of(match: ErrorMatch, error: TritonError, request_id: str = "5d29") -> str | None:
    rule = EarlyExitRule(reason="no_text", error=match)
    return EarlyExitRules((rule,), frozenset({"outer"}), KEY.encode()).reason_of_error(error.upstream, request_id)


def test_the_plain_exit_matches_its_rule(recipes: dict[str, object]) -> None:
    match = ErrorMatch(code="ALREADY_EXISTS", message="EARLY_EXIT[no_text]")
    assert reason_of(match, recipes["nothing_to_do"]("no_text")) == "no_text"  # type: ignore[operator]


def test_the_signed_exit_is_valid_for_its_own_request_only(recipes: dict[str, object]) -> None:
    signed = recipes["signed_exit"](REQUEST, "no_text")  # type: ignore[operator]
    match = ErrorMatch(code="any", signed=True)
    assert (reason_of(match, signed), reason_of(match, signed, "another")) == ("no_text", None)


CONFIG = """
backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: [1] }
output { name: "SHOUTED" data_type: TYPE_STRING dims: [1] }
max_batch_size: 8
"""
PIPELINE = """
pipelines:
  shout:
    model: shout
    inputs: {text: {tensor: TEXT, kind: text}}
    outputs: {shouted: {tensor: SHOUTED, kind: text}}
    rejects_input: [shout]
    early_exit: [{reason: no_text, error: {code: ALREADY_EXISTS, message: "EARLY_EXIT[no_text]"}}]
"""


def write_model(folder: Path) -> None:
    (folder / "shout" / "1").mkdir(parents=True)
    (folder / "shout" / "config.pbtxt").write_text(CONFIG)
    (code,) = [text for language, text in blocks_of(ROOT / "docs/reference/model-kit.md") if language == "python"]
    (folder / "shout" / "1" / "model.py").write_text(code)


shouting = live_triton(write_model)


def test_the_model_of_the_page_works(shouting: EmbeddedTriton, start_gateway: StartGateway, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(PIPELINE)
    url = start_gateway(triton_url=shouting.grpc_url, config=str(tmp_path / "gateway.yaml")).url
    answers = [httpx.post(f"{url}/v1/pipelines/shout", json={"text": text}) for text in ("hello", "", "x" * 1001)]
    assert [each.status_code for each in answers] == [200, 200, 422]
    assert answers[0].json() == {"shouted": "HELLO", "early_exit": None}
    assert answers[1].json() == {"shouted": None, "early_exit": "no_text"}


def test_the_kit_is_a_package(tmp_path: Path) -> None:
    command = ["hatchling", "build", "--target", "wheel", "--directory", tmp_path]
    subprocess.run([ROOT / ".venv/bin" / command[0], *command[1:]], cwd=ROOT / "model_kit", check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert {"model_kit/serving.py", "model_kit/outcomes.py"} < {*wheel.namelist()}


LANGUAGES = {"sh", "python", "js", "html", "yaml", "nginx"}
RUN_BY = {
    ("README.md", "sh"): "tests/docs/test_tutorials.py",
    ("app/starter/README.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/explanation/early-exit.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/how-to/existing-triton.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/how-to/javascript.md", "js"): "tests/browser/test_client_pages.py",
    ("docs/how-to/keys.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/how-to/migration.md", "python"): "tests/clients/test_reference_models.py",
    ("docs/how-to/proxies.md", "nginx"): "tests/toolkit/nginx.py",
    ("docs/how-to/python-client.md", "python"): "tests/browser/test_client_pages.py",
    ("docs/how-to/sessions.md", "sh"): "tests/live/test_sessions.py",
    ("docs/how-to/standalone-triton.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/how-to/own-server.md", "js"): "tests/typescript/test_client.py",
    ("docs/reference/websocket.md", "python"): "tests/live/test_sockets.py",
    ("docs/tutorials/llm-in-a-browser.md", "js"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/llm-of-your-triton.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/llm-of-your-triton.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/speak-to-your-triton.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/speak-to-your-triton.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/own-ensemble.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/reference/model-kit.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/own-ensemble.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/own-ensemble.md", "yaml"): "tests/docs/test_tutorials.py",
}
"""The test that runs the blocks of a page, by page and language. Blocks that a test of all pages runs are left out."""

Block = tuple[str, str, str]


@cache
def blocks() -> list[Block]:
    """Returns (page, language, text) of every block that a test must run."""
    found = [(str(page.relative_to(ROOT)), *block) for page in ALL_PAGES for block in blocks_of(page)]
    return [block for block in found if block[1] in LANGUAGES]


def yaml_blocks() -> list[Block]:
    return [block for block in blocks() if block[1] == "yaml" and (block[0], "yaml") not in RUN_BY]


def is_run(block: Block) -> bool:
    page, language, text = block
    by_all = {(name, command) for name, command, _ in commands()} | set(snippets())
    return (page, text) in by_all or (page, language) in RUN_BY or block in yaml_blocks()


def test_every_block_is_run_by_a_test() -> None:
    assert len(blocks()) > 30
    assert [(page, text) for page, language, text in blocks() if not is_run((page, language, text))] == []


@pytest.mark.parametrize(("page", "language"), RUN_BY)
def test_the_named_test_reads_the_page(page: str, language: str) -> None:
    assert [block for block in blocks() if block[:2] == (page, language)], "the page has no such block"
    assert Path(page).name in (ROOT / RUN_BY[page, language]).read_text()


def is_gateway_yaml(text: str, folder: Path) -> None:
    (folder / "gateway.yaml").write_text(text)
    assert read_gateway_file(folder / "gateway.yaml")


def is_keys_file(text: str, folder: Path) -> None:
    (folder / "keys.yaml").write_text(text)
    assert read_keys(folder / "keys.yaml", DIALECTS)


def is_contract(text: str, _: Path) -> None:
    contract = yaml.safe_load(text)["contract"]
    assert TypeAdapter(dict[str, ContractSpec]).validate_python(contract)


def is_chart_values(text: str, _: Path) -> None:
    schema = yaml.safe_load((ROOT / "helm" / "triton-gateway" / "values.schema.json").read_text())
    assert list(Draft7Validator(schema).iter_errors(yaml.safe_load(text))) == []


CHECK_BY_KEY: dict[str, Callable[[str, Path], None]] = {
    "pipelines": is_gateway_yaml,
    "keys": is_keys_file,
    "contract": is_contract,
    **dict.fromkeys(("autoscaling", "gateway", "podMonitor", "sessionAffinity", "triton"), is_chart_values),
}
"""The check of a block of YAML, by its first key."""


@pytest.mark.parametrize("block", yaml_blocks(), ids=lambda block: block[0])
def test_a_block_of_yaml_is_valid(block: Block, tmp_path: Path) -> None:
    CHECK_BY_KEY[next(iter(yaml.safe_load(block[2])))](block[2], tmp_path)


def test_the_command_that_makes_a_key_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first command of keys.md prints a key and its entry for the keys file."""
    (command, *_) = [text for page, language, text in blocks() if page.endswith("keys.md") and language == "sh"]
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("tgw_")
    is_keys_file("keys:\n" + printed.err.removeprefix("keys:\n"), tmp_path)
