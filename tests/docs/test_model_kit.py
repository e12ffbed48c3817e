"""The model of docs/reference/model-kit.md answers, exits early and refuses input on a real Triton."""

import subprocess
import zipfile
from pathlib import Path

import httpx

from app.launcher.embedded_triton import EmbeddedTriton
from tests.docs.pages import ROOT, blocks_of
from tests.toolkit.processes import StartGateway, live_triton

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
