"""The request parameter `traceparent`: only models that declare it get it, in every dialect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton

SCRIPT = Path(__file__).parent / "strict_model.py"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
TENSORS = """
input [ { name: "TEXT", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [ { name: "SAID", data_type: TYPE_STRING, dims: [ 1 ] } ]
"""
READS = """
parameters { key: "reads_traceparent" value { string_value: "true" } }
parameters { key: "READS" value { string_value: "true" } }
"""
MODELS = {"strict": "", "reader": READS}


def write_models(repository: Path) -> None:
    """Each model, and an ensemble of nothing but it."""
    for name, rest in MODELS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").symlink_to(SCRIPT)
        policy = "model_transaction_policy { decoupled: true } instance_group [ { kind: KIND_CPU count: 1 } ]"
        (repository / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"{TENSORS}{policy}{rest}')
        (repository / f"{name}_chain" / "1").mkdir(parents=True)
        step = (
            f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "TEXT" value: "TEXT" }} '
            'output_map { key: "SAID" value: "SAID" } }'
        )
        text = f'name: "{name}_chain"\nplatform: "ensemble"{TENSORS}ensemble_scheduling {{ step [ {step} ] }}'
        (repository / f"{name}_chain" / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    repository = tmp_path_factory.mktemp("strict")
    write_models(repository)
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    of_model = {
        "stream": True,
        "inputs": {"text": {"tensor": "TEXT", "kind": "text"}},
        "outputs": {"said": {"tensor": "SAID", "kind": "text"}},
        "openai": {
            "completions": {"prompt": "text", "text": "said"},
            "chat": {"prompt": "text", "text": "said", "template_text": "{{ messages[0].content }}"},
        },
    }
    pipelines = {model: {"model": model, **of_model} for each in MODELS for model in (each, f"{each}_chain")}
    (folder / "gateway.yaml").write_text(json.dumps({"pipelines": pipelines}))
    with running_gateway(folder, triton_url=triton.grpc_url, config=str(folder / "gateway.yaml")) as process:
        yield process


def calls(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["q"]}
    messages = [{"role": "user", "content": "q"}]
    return {
        "pipeline": (f"/v1/pipelines/{model}", {"text": "q"}),
        "stream": (f"/v1/pipelines/{model}/stream", {"text": "q"}),
        "completion": ("/v1/completions", {"model": model, "prompt": "q"}),
        "streamed completion": ("/v1/completions", {"model": model, "prompt": "q", "stream": True}),
        "chat": ("/v1/chat/completions", {"model": model, "messages": messages}),
        "infer": (f"/v2/models/{model}/infer", {"inputs": [tensor]}),
        "generate": (f"/v2/models/{model}/generate", {"TEXT": "q"}),
        "generate_stream": (f"/v2/models/{model}/generate_stream", {"TEXT": "q", "parameters": {"max_tokens": 4}}),
    }


def resumable(client: httpx.Client, model: str) -> str:
    started = client.post("/v1/streams", json={"pipeline": model, "inputs": {"text": "q"}}, headers=HEADERS)
    return client.get(started.headers["Location"]).text


@pytest.mark.parametrize("model", ["strict", "strict_chain"])
def test_other_models_get_no_unknown_parameter(gateway: GatewayProcess, model: str) -> None:
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        for dialect, (path, body) in calls(model).items():
            answer = client.post(path, json=body, headers=HEADERS)
            assert (answer.status_code, "error" in answer.text) == (200, False), (dialect, answer.text)
            assert '"q"' in answer.text, (dialect, answer.text)
        assert "event: done" in resumable(client, model)


@pytest.mark.parametrize("model", ["reader", "reader_chain"])
def test_a_model_that_declares_it_gets_the_trace(gateway: GatewayProcess, model: str) -> None:
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        for dialect, (path, body) in calls(model).items():
            answer = client.post(path, json=body, headers=HEADERS)
            assert f"00-{TRACE_ID}-" in answer.text, (dialect, answer.text)
        assert f"00-{TRACE_ID}-" in resumable(client, model)
        assert "none" in client.post(f"/v2/models/{model}/generate", json={"TEXT": "q"}).text
