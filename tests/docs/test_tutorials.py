"""The tutorials and recipes work as printed: files, commands and answers of tutorials with the real Triton."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.core.errors import UpstreamError
from app.launcher.launch import EmbeddedOptions
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.spec import EarlyExitRule, ErrorMatch
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.docs.walkthrough import Reader, blocks_after
from tests.toolkit.processes import GatewayProcess, running_triton
from tests.zoo.kinds import BY_NAME
from tests.zoo.repository import write_models

TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.usefixtures("models_venv")
def test_own_ensemble_works_as_printed(tmp_path: Path, require: Require) -> None:
    require(shutil.which("curl"), "there is no curl")
    folder = tmp_path / "colours"
    folder.mkdir()
    reader = Reader(folder)
    try:
        reader.follow(blocks_after(TUTORIALS / "own-ensemble.md", "A Python model"))
    finally:
        statuses = list(reader.leave())
    assert statuses == [0]


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
        try:
            reader.follow(blocks_after(TUTORIALS / "llm-of-your-triton.md", "A model folder"))
        finally:
            statuses = list(reader.leave())
    assert statuses == [0] * 2


def test_speak_to_your_triton_works_as_printed(tmp_path: Path, gateway: GatewayProcess, require: Require) -> None:
    require(shutil.which("curl"), "there is no curl")
    for name in ("samples", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    reader = Reader(tmp_path, {"127.0.0.1:8080": gateway.url.removeprefix("http://")})
    blocks = blocks_after(TUTORIALS / "speak-to-your-triton.md", "With curl")
    assert [each.language for each in blocks] == ["sh", "text", "python", "sh", "text"]
    reader.follow(blocks)


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
