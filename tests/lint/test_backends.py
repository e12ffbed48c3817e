"""The linter on LLM backends, whose repositories have the files of NVIDIA's backends."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.lint.findings import Finding
from app.lint.linter import check
from app.pipelines.file import read_gateway_file
from app.triton.repository import read_repository
from tests.toolkit.broken_repositories import BROKEN, DECOUPLED, FLAG, VLLM, VLLM_COUNTS, Repository, engine

TWO = "instance_group [ { kind: KIND_CPU count: 2 } ]"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "models")


def findings(repository: Repository, gateway: str = "") -> list[Finding]:
    """``gateway``: the text of gateway.yaml; empty: each model is a pipeline."""
    path = repository.path.parent / "gateway.yaml"
    if gateway:
        path.write_text(gateway)
    return check(read_repository(repository.path), read_gateway_file(path) if gateway else None)


def codes(found: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in found]


def ensemble_of_engine(
    repository: Repository, rest_of_postprocessing: str = "", rest_of_engine: str = DECOUPLED
) -> None:
    """TensorRT-LLM's ensemble, with few of its tensors."""
    tokens = "IDS:INT32:-1"
    repository.model("preprocessing", "QUERY:STRING:1 WORDS:STRING:-1:optional LENGTH:INT32:1", tokens)
    repository.model("tensorrt_llm", "input_ids:INT32:-1", "output_ids:INT32:-1", rest_of_engine)
    repository.model("postprocessing", "TOKENS:INT32:-1", "OUTPUT:STRING", rest_of_postprocessing)
    repository.ensemble(
        "ensemble",
        "text_input:STRING:1 max_tokens:INT32:1 stop_words:STRING:-1:optional",
        "text_output:STRING",
        "preprocessing QUERY=text_input WORDS=stop_words LENGTH=max_tokens > IDS=ids",
        "tensorrt_llm input_ids=ids > output_ids=tokens",
        "postprocessing TOKENS=tokens > OUTPUT=text_output",
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("vllm", "the preset vllm uses 'return_finish_reason' and 'finish_reason', which the model does not have"),
        ("tensorrt_llm", "; the model has the tensors of the preset vllm"),
    ],
)
def test_a_declared_preset_is_compared_with_the_model(repository: Repository, preset: str, expected: str) -> None:
    BROKEN["preset-mismatch"].build(repository)
    found = findings(repository, f"pipelines: {{llm: {{model: broken, preset: {preset}}}}}\n")
    (mismatch,) = (each for each in found if each.code == "preset-mismatch")
    assert expected in mismatch.text
    assert (mismatch.model, mismatch.pipeline) == ("broken", "llm")


def test_a_tensor_of_another_name_can_be_declared(repository: Repository) -> None:
    outputs = "text_output:STRING logprobs:STRING num_input_tokens:UINT32:1 num_output_tokens:UINT32 WHY:STRING"
    repository.model("llm", f"{VLLM} {VLLM_COUNTS} tell_why:{FLAG}", outputs, DECOUPLED)
    fields = "parameters: {return_finish_reason: {tensor: tell_why}}, outputs: {finish_reason: {tensor: WHY}}"
    pipelines = "pipelines: {{llm: {{model: llm, preset: vllm{}}}}}\n"
    assert codes(findings(repository, pipelines.format(""))) == ["preset-mismatch"]
    assert findings(repository, pipelines.format(f", {fields}")) == []


@pytest.mark.parametrize("given", ["decoupled: False", "decoupled: True"])
def test_the_llm_api_model_streams_as_its_model_yaml_says(repository: Repository, given: str) -> None:
    BROKEN["not-decoupled"].build(repository)
    text = f"model: TinyLlama\nbackend: pytorch\ntriton_config:\n  max_batch_size: 0\n  {given}\n"
    (repository.path / "broken" / "1" / "model.yaml").write_text(text)
    assert codes(findings(repository)) == (["not-decoupled"] if "False" in given else [])


@pytest.mark.parametrize("text", ["triton_config: [", "- a", "triton_config: {decoupled: maybe}", "", "\xff"])
def test_a_model_yaml_of_another_kind_is_ignored(repository: Repository, text: str) -> None:
    BROKEN["not-decoupled"].build(repository)
    (repository.path / "broken" / "1" / "model.yaml").write_bytes(text.encode("latin-1"))
    assert codes(findings(repository)) == ["not-decoupled"]


def test_a_pipeline_without_streams_needs_no_decoupled_model(repository: Repository) -> None:
    BROKEN["not-decoupled"].build(repository)
    keys = "model: broken, preset: tensorrt_llm_api"
    assert findings(repository, f"pipelines: {{llm: {{{keys}, stream: false}}}}\n") == []
    assert codes(findings(repository, f"pipelines: {{llm: {{{keys}}}}}\n")) == ["not-decoupled"]


@pytest.mark.parametrize(
    ("accumulates", "expected"),
    [("", ["split-characters"]), ("false", ["split-characters"]), ("${accumulate_tokens}", ["split-characters"])]
    + [(each, list[str]()) for each in ("true", "True", "yes", "1", "t")],
)
def test_a_script_must_accumulate_tokens(repository: Repository, accumulates: str, expected: list[str]) -> None:
    """The values are those that the script of ``tensorrt_llm_bls`` knows."""
    engine("tensorrt_llm_bls", accumulate_tokens=accumulates)(repository)
    assert codes(findings(repository)) == expected


def test_a_script_that_does_not_stream_may_decode_at_once(repository: Repository) -> None:
    engine("tensorrt_llm_bls", decoupled=False)(repository)
    assert codes(findings(repository)) == ["not-decoupled"]
    assert (
        findings(repository, "pipelines: {llm: {model: tensorrt_llm_bls, stream: false, preset: tensorrt_llm}}\n") == []
    )


def test_the_ensemble_splits_characters(repository: Repository) -> None:
    ensemble_of_engine(repository)
    found = [each for each in findings(repository) if each.code != "preset-mismatch"]
    assert codes(found) == ["split-characters"]
    assert found[0].text.endswith("use tensorrt_llm_bls with accumulate_tokens: true")


def test_the_ensemble_mixes_tokens_with_several_instances_of_postprocessing(repository: Repository) -> None:
    ensemble_of_engine(repository, TWO)
    found = findings(repository)
    assert [(each.model, each.step) for each in found if each.code == "unordered-stream"] == [("ensemble", 3)]


def test_the_ensemble_over_an_engine_that_is_not_decoupled_cannot_stream(repository: Repository) -> None:
    ensemble_of_engine(repository, TWO, "")
    assert set(codes(findings(repository))) == {"preset-mismatch", "not-decoupled"}


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [('key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "True" }', []), ('key: "a"', ["no-health-check"])],
)
@pytest.mark.parametrize("backend", ['backend: "vllm"', ""])
def test_a_vllm_model_checks_its_engine(
    repository: Repository, backend: str, parameter: str, expected: list[str]
) -> None:
    """Without ``backend``, Triton chooses it by the file model.json."""
    repository.write("llm", f'name: "llm"\n{backend}\nparameters {{ {parameter} }}')
    (repository.path / "llm" / "1" / "model.json").write_text(json.dumps({"model": "facebook/opt-125m"}))
    assert codes(findings(repository)) == expected


def test_a_pipeline_over_an_auto_completed_model_is_not_checked(repository: Repository) -> None:
    repository.write("llm", 'name: "llm"\nbackend: "vllm"\nparameters { key: "ENABLE_VLLM_HEALTH_CHECK" }')
    found = findings(repository, "pipelines: {llm: {model: llm, preset: vllm}}\n")
    assert codes(found) == ["no-health-check", "unknown-edge"]
    assert found[1].text == (
        "pipeline 'llm' relies on auto-completion: its fields are not checked (to check them, use --triton)"
    )
