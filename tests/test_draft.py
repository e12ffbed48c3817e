"""A first gateway.yaml from the models of a running Triton."""

from pathlib import Path

import pytest

from app import cli
from app.check import FileTaken, write_draft
from app.core.model import ModelConfig, SequenceBatching
from app.launcher.embedded_triton import EmbeddedTriton
from app.pipelines.file import read_gateway_file
from tests.pipelines.test_presets import VLLM
from tests.toolkit.models import ensemble, model

URL = "127.0.0.1:8001"


def drafted(folder: Path, *configs: ModelConfig) -> str:
    write_draft({config.name: config for config in configs}, URL, folder / "gateway.yaml")
    return (folder / "gateway.yaml").read_text()


def test_the_file_has_fields_kinds_and_streams(tmp_path: Path) -> None:
    config = model(
        [
            *("PROMPT BYTES [1]", "input_image BYTES [1] optional", "Audio.wav BYTES [1]", "doc_json BYTES [1]"),
            "N INT32 [1]",
        ],
        ["TEXT BYTES [1]"],
        name="llm",
        decoupled=True,
    )
    text = drafted(tmp_path, config)
    spec = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines["llm"]
    assert {name: each.kind for name, each in spec.inputs.items()} == {
        "prompt": "text",
        "input_image": "image",
        "audio.wav": "binary",
        "doc_json": "json",
        "n": "number",
    }
    assert spec.inputs["input_image"].optional
    assert spec.stream is not None
    assert text.count("# a guess\n") == 5


@pytest.mark.parametrize("datatype", ["UINT8", "INT8"])
def test_files_in_numbers_are_guessed_only_where_the_name_is_clear(tmp_path: Path, datatype: str) -> None:
    names = {"ENCODED": "binary", "jpeg_image": "binary", "image_mask": "number", "text_lengths": "number"}
    drafted(tmp_path, model([f"{name} {datatype} [-1]" for name in names], f"PNG {datatype} [4]", name="decode"))
    spec = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines["decode"]
    assert {each.tensor: each.kind for each in spec.inputs.values()} == names
    assert spec.outputs["png"].kind == "number"


def test_an_llm_backend_gets_its_preset(tmp_path: Path) -> None:
    text = drafted(tmp_path, VLLM)
    (pipeline,) = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines.values()
    assert (pipeline.model, pipeline.preset) == ("model", "vllm")
    assert "    preset: vllm  # by its tensors" in text


def test_steps_of_an_ensemble_get_no_pipeline(tmp_path: Path) -> None:
    step, other = model("X FP32 [4]", "Y FP32 [4]", name="step"), model("T BYTES [1]", "U BYTES [1]", name="other")
    whole = ensemble("whole", step)
    text = drafted(tmp_path, step, other, whole)
    assert list(read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines) == ["whole", "other"]
    assert "# Steps of ensembles, without a pipeline of their own: step\n" in text


def test_a_model_that_cannot_be_served_is_a_comment_with_the_reason(tmp_path: Path) -> None:
    unknown = model("X FP4 [4]", "Y FP32 [4]", name="unknown")
    text = drafted(tmp_path, unknown, model("T BYTES [1]", "U BYTES [1]", name="other"))
    assert "# The gateway cannot serve it like this: inputs.x.tensor has datatype FP4, which has no JSON form" in text
    assert list(read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines) == ["other"]


def test_a_model_with_a_state_gets_a_session(tmp_path: Path) -> None:
    drafted(tmp_path, model("X FP32 [4]", "Y FP32 [4]", name="stateful", sequence=SequenceBatching()))
    assert read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines["stateful"].session is not None


@pytest.mark.parametrize("name", ["true", "1e3", "null", "a.b-c", "0x10"])
def test_names_that_yaml_would_read_as_values_are_quoted(tmp_path: Path, name: str) -> None:
    drafted(tmp_path, model("early_exit FP32 [4]", "no FP32 [4]", name=name))
    (pipeline,) = read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines.values()
    assert pipeline.model == name
    assert pipeline.inputs["_early_exit"].tensor == "early_exit"


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("mine")
    with pytest.raises(FileTaken, match="already exists"):
        drafted(tmp_path, model("X FP32 [4]", "Y FP32 [4]", name="m"))
    assert (tmp_path / "gateway.yaml").read_text() == "mine"


def test_without_a_usable_model_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileTaken, match="has no ready model"):
        drafted(tmp_path)
    assert not (tmp_path / "gateway.yaml").exists()


def test_the_reference_models_get_pipelines_that_compile(
    triton: EmbeddedTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "configure_logging", lambda level, style: None)
    assert cli.main(["init", str(tmp_path), "--triton", triton.grpc_url]) == 0
    assert f"triton-gateway serve --triton {triton.grpc_url}" in capsys.readouterr().out
    assert cli.main(["check", "--triton", triton.grpc_url, "--config", str(tmp_path / "gateway.yaml")]) in {0, 1}
    names = list(read_gateway_file(tmp_path / "gateway.yaml").spec.pipelines)
    assert "ocr_ensemble" in names
    assert "text_detect" not in names
