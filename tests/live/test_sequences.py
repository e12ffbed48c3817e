"""Sequence ids against a real Triton: the right ones reach it, the others are refused and harm nobody."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.sequences import MODELS, write_sequence_models
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton

LARGEST = {"seq_uint64": 2**64 - 1, "seq_int64": 2**63 - 1, "seq_uint32": 2**32 - 1, "seq_int32": 2**31 - 1}
LARGEST |= {"seq_chain": 2**32 - 1, "seq_outer": 2**32 - 1, "seq_plain": 2**64 - 1}
WHOLE = {"sequence_start": True, "sequence_end": True}
PIPELINES = """
pipelines:
  session:
    model: seq_chain
    inputs: {text: {tensor: TEXT, kind: text}}
    outputs: {joined: {tensor: JOINED, kind: text}}
    stream: true
    openai: {completions: {prompt: text, text: joined}}
  iterative: {model: seq_iterative, stream: true}
oip: {models: all}
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """A Triton of its own, because a failure of these tests would end the session's Triton."""
    repository = tmp_path_factory.mktemp("sequences")
    write_sequence_models(repository)
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "gateway.yaml").write_text(PIPELINES)
    with running_gateway(folder, triton_url=triton.grpc_url, config=str(folder / "gateway.yaml")) as process:
        yield process


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20) as session:
        yield session


def infer(client: httpx.Client, model: str, text: str, **parameters: Any) -> httpx.Response:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [text]}
    return client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor], "parameters": parameters})


def outputs(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    by_name = {each["name"]: each["data"][0] for each in answer.json()["outputs"]}
    return by_name["JOINED"], by_name["SEEN_ID"]


@pytest.mark.parametrize("model", [*LARGEST, "seq_text"])
def test_a_sequence_keeps_its_state(client: httpx.Client, model: str) -> None:
    numbers = (7, LARGEST[model]) if model in LARGEST else ()
    texts = {"seq_text": ("y" * 128,), "seq_plain": ("x", "x" * 127)}
    for own_id in (*numbers, *texts.get(model, ())):
        assert outputs(infer(client, model, "a", sequence_id=own_id, sequence_start=True)) == ("a", str(own_id))
        assert outputs(infer(client, model, "b", sequence_id=own_id)) == ("ab", str(own_id))
        assert outputs(infer(client, model, "c", sequence_id=own_id, sequence_end=True)) == ("abc", str(own_id))


SOME, ALL = (1, 2, 4, 7, 8, 9, 16, 64, 127, 128), tuple(range(1, 129))
"""Lengths of texts, and numbers."""


def wrong_ids(model: str, sizes: tuple[int, ...]) -> list[Any]:
    texts = ["", "\u00fc" * 65, "x" * 129, "a\0b"]
    numbers = [0, -1, 2**64, 2**200, 1.5, True, None, [1], {"a": 1}]
    if model == "seq_text":
        return [*numbers, *texts, *sizes, *("x" * size for size in (125, 126, 127))]
    if model == "seq_plain":
        return [*numbers, *texts]
    if model in {"seq_iterative", "seq_mixed"}:
        return [*numbers[1:], *texts[1:], *sizes, "x"]
    largest = LARGEST[model]
    return [*numbers, *texts, *("x" * size for size in sizes), largest + 1, largest + 8]


@pytest.mark.parametrize("sizes", [SOME, pytest.param(ALL, marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("model", [*MODELS, "seq_iterative", "seq_chain", "seq_outer", "seq_mixed"])
def test_wrong_ids_are_400_and_reach_no_model(
    client: httpx.Client, gateway: GatewayProcess, triton: EmbeddedTriton, model: str, sizes: tuple[int, ...]
) -> None:
    calls = gateway.metric("triton_calls_total", model=model)
    path = f"/v2/models/{model}"
    for own_id in wrong_ids(model, sizes):
        tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["q"]}
        parameters = {"sequence_id": own_id, **WHOLE}
        answers = [
            client.post(f"{path}/infer", json={"inputs": [tensor], "parameters": parameters}),
            client.post(f"{path}/versions/1/infer", json={"inputs": [tensor], "parameters": parameters}),
            client.post(f"{path}/generate", json={"TEXT": "q", **parameters}),
            client.post(f"{path}/generate_stream", json={"TEXT": "q", "parameters": parameters}),
        ]
        assert [answer.status_code for answer in answers] == [400] * 4, (own_id, [each.text for each in answers])
    assert gateway.metric("triton_calls_total", model=model) == calls
    assert is_alive(triton)


def is_alive(triton: EmbeddedTriton) -> bool:
    """Whether Triton and the process of each model answer."""
    with httpx.Client(base_url=triton.http_url, timeout=20) as direct:
        return outputs(infer(direct, "seq_uint64", "a", sequence_id=9, **WHOLE)) == ("a", "9")


@pytest.mark.parametrize("name", ["ID", "START"])
def test_a_control_input_of_a_caller_is_400(client: httpx.Client, name: str) -> None:
    tensors = [
        {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["q"]},
        {"name": name, "datatype": "UINT64", "shape": [1], "data": [9]},
    ]
    body = {"inputs": tensors, "parameters": {"sequence_id": 3, **WHOLE}}
    assert client.post("/v2/models/seq_uint64/infer", json=body).status_code == 400


def test_a_request_without_an_id_says_what_to_send(client: httpx.Client) -> None:
    for answer in (infer(client, "seq_outer", "q"), client.post("/v2/models/seq_outer/generate", json={"TEXT": "q"})):
        assert answer.status_code == 400
        text = answer.json()["error"]
        assert "'seq_uint32' must specify a non-zero or non-empty correlation ID" in text
        assert "`sequence_id`, an integer of 1 to 4294967295" in text
    raw = client.post(
        "/v2/models/seq_plain/infer", content=b"\x01\0\0\0q", headers={"Inference-Header-Content-Length": "0"}
    )
    assert (raw.status_code, "correlation ID" in raw.text) == (400, True)


def test_a_sequence_that_was_not_started_is_400(client: httpx.Client) -> None:
    for model in ("seq_uint64", "seq_chain"):
        answer = infer(client, model, "q", sequence_id=123456)
        assert (answer.status_code, "`sequence_start: true`" in answer.text) == (400, True)
        assert "123456" not in answer.text


def test_a_pipeline_without_sessions_names_v2(client: httpx.Client) -> None:
    answers = [
        client.post("/v1/pipelines/session", json={"text": "q"}),
        client.post("/v1/pipelines/session/stream", json={"text": "q"}),
        client.post("/v1/streams", json={"pipeline": "session", "inputs": {"text": "q"}}),
        client.post("/v1/completions", json={"model": "session", "prompt": "q"}),
    ]
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert "needs a session" in answer.text
        assert "/v2/models/seq_chain/infer" in answer.text


def test_iterative_sequences_need_no_id(client: httpx.Client) -> None:
    assert outputs(infer(client, "seq_iterative", "a"))[0] == "a"
    answer = client.post("/v1/pipelines/iterative", json={"TEXT": "b"})
    assert (answer.status_code, answer.json()["JOINED"]) == (200, "b")
    assert infer(client, "seq_iterative", "c", sequence_id=1, **WHOLE).status_code == 400


def test_the_start_and_check_name_the_pipelines_that_need_a_session(gateway: GatewayProcess) -> None:
    lines = [line for line in gateway.json_lines() if line.get("code") == "needs-session"]
    assert [(line["model"], line["level"].lower()) for line in lines] == [("seq_chain", "warning")]
    findings = httpx.get(f"{gateway.url}/v1/findings").json()
    assert [each["model"] for each in findings["findings"] if each["code"] == "needs-session"] == ["seq_chain"]
    assert json.dumps(findings).count("/v2") >= 1
