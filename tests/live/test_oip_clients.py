"""Requests of Triton's clients to ``/v2`` that need models of their own: some outputs of an ensemble, and raw texts."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from app.launcher.launch import EmbeddedOptions
from tests.live.side_by_side import Both, answer_of, both_at, raw_texts
from tests.toolkit.processes import running_gateway, running_triton

SCRIPT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._response(request) for request in requests]

    def _response(self, request):
        (given,) = request.inputs()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", OF(given.as_numpy()))])
"""
STEP = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
TEXTS = """
backend: "python"
input [ { name: "IN" data_type: TYPE_STRING dims: [ DIM ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
SIZES = "lambda texts: np.array([len(each) for each in texts.reshape(-1)], np.int32)"
HEADS = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [
  { name: "FEATURES" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "A" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "B" data_type: TYPE_FP32 dims: [ 3 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "features" model_version: -1
      input_map { key: "IN" value: "X" } output_map { key: "OUT" value: "FEATURES" }
    },
    {
      model_name: "head" model_version: -1
      input_map { key: "IN" value: "FEATURES" } output_map { key: "OUT" value: "A" }
    },
    {
      model_name: "head" model_version: -1
      input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" }
    }
  ]
}
"""
VALUES = {"FEATURES": [2.0, 4.0, 6.0], "A": [3.0, 5.0, 7.0], "B": [4.0, 6.0, 8.0]}


def write(models: Path, name: str, config: str, of: str | None = None) -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(config)
    if of is not None:
        (models / name / "1" / "model.py").write_text(SCRIPT.replace("OF", of))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("clients")
    models = folder / "models"
    write(models, "heads", HEADS)
    write(models, "features", STEP, "(lambda x: 2 * x)")
    write(models, "head", STEP, "(lambda x: x + 1)")
    write(models, "undeclared", STEP, "(lambda x: x.astype(np.int8)[None])")
    write(models, "text", TEXTS.replace("DIM", "1"), f"({SIZES})")
    write(models, "batched", "max_batch_size: 4" + TEXTS.replace("DIM", "1"), f"(lambda texts: ({SIZES})(texts)[None])")
    write(models, "texts", TEXTS.replace("DIM", "-1"), f"({SIZES})")
    with (
        running_triton(EmbeddedOptions(models, models_venv)) as triton,
        running_gateway(folder / "gateway", triton_url=triton.grpc_url) as gateway,
        both_at(triton.http_url, gateway.url) as clients,
    ):
        yield clients


def test_some_outputs_of_an_ensemble_are_answered(both: Both) -> None:
    address = str(both.gateway.base_url).split("//")[1].rstrip("/")
    given = tritonclient.http.InferInput("X", [1, 3], "FP32")
    given.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
    with tritonclient.http.InferenceServerClient(address) as client:
        for names in (("A",), ("FEATURES",), ("B", "A"), ("A", "B", "FEATURES")):
            for is_binary in (False, True):
                wanted = [tritonclient.http.InferRequestedOutput(name, binary_data=is_binary) for name in names]
                answer = client.infer("heads", [given], outputs=wanted)
                assert {each["name"] for each in answer.get_response()["outputs"]} == set(names)
                assert [answer.as_numpy(name).tolist() for name in names] == [[VALUES[name]] for name in names]
    body = {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}],
        "outputs": [{"name": "A", "parameters": {"classification": 1}}],
    }
    classes = answer_of(both.gateway.post("/v2/models/heads/infer", json=body))
    assert classes.tensors == {"A": ("BYTES", [1, 1], ["7.000000:2"])}


def test_a_raw_body_is_the_only_text(both: Both) -> None:
    for model in ("text", "batched"):
        for body in (b"\x89PNG" * 2000, raw_texts(b"a body with its length"), b"x", b""):
            theirs, ours = both.post(f"/v2/models/{model}/infer", body, Inference_Header_Content_Length="0")
            assert answer_of(ours) == answer_of(theirs)
            assert np.frombuffer(answer_of(ours).tensors["OUT"][2], np.int32).tolist() == [len(body)]
    refused = both.post("/v2/models/texts/infer", raw_texts(b"a", b"b"), Inference_Header_Content_Length="0")
    for answer in refused:
        assert answer.status_code == 400
        text = "For BYTE datatype raw input 'IN', the model must have input shape [1]"
        assert text in json.loads(answer.content)["error"]


def test_an_output_that_differs_from_its_declaration_is_that_of_triton(both: Both) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    theirs, ours = both.post("/v2/models/undeclared/infer", json.dumps({"inputs": [tensor]}).encode())
    assert answer_of(ours) == answer_of(theirs)
    assert answer_of(ours).tensors == {"OUT": ("INT8", [1, 1, 3], [1, 2, 3])}
