"""Pipelines with steps under /v2, by their own names: each is one model there."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
import yaml

from tests.toolkit.processes import GatewayProcess, linked_models, live_gateway, live_triton

PIPELINES: dict[str, Any] = {
    "shop": {
        "inputs": {"first": {"tensor": "FIRST", "kind": "text"}, "second": {"tensor": "SECOND", "kind": "text"}},
        "parameters": {
            "mode": {"type": "string", "default": "whole"},
            "least": {"type": "number", "optional": True},
        },
        "steps": {
            "first": {"model": "scripted", "inputs": {"SCRIPT": "FIRST"}},
            "stop": {"when": {"empty": "first.NUMBERS"}, "exit": "nothing_to_do"},
            "second": {
                "model": "scripted",
                "inputs": {"SCRIPT": "SECOND"},
                "when": {"equals": ["mode", "whole"]},
                "after": ["stop"],
            },
            "low": {"when": {"any": {"below": ["first.NUMBERS", 0]}}, "exit": "low", "after": ["second"]},
            "never": {"when": {"at_least": ["least", 10]}, "exit": "least"},
        },
        "outputs": {
            "numbers": {"tensor": "first.NUMBERS"},
            "text": {"tensor": "second.TEXT", "kind": "text"},
            "more": {"tensor": "second.NUMBERS"},
        },
    },
    "story": {
        "inputs": {"prompt": {"tensor": "PROMPT", "kind": "text"}},
        "parameters": {"kind": {"type": "string"}},
        "steps": {
            "generate": {"model": "scripted_stream", "inputs": {"SCRIPT": "PROMPT"}},
            "bad": {"when": {"equals": ["generate.TEXT", "bad "]}, "exit": "unsafe"},
            "other": {"when": {"equals": ["kind", "other"]}, "exit": "other_kind"},
        },
        "outputs": {"text": {"tensor": "generate.TEXT", "kind": "text"}},
        "stream": True,
    },
    "hidden": {
        "inputs": {"first": {"tensor": "FIRST", "kind": "text"}},
        "steps": {"first": {"model": "scripted", "inputs": {"SCRIPT": "FIRST"}}},
        "outputs": {"text": {"tensor": "first.TEXT", "kind": "text"}},
    },
}
CONFIG = yaml.safe_dump({"pipelines": PIPELINES, "oip": {"models": ["shop", "story"]}}, sort_keys=False)
own_triton = live_triton(lambda folder: linked_models(folder, ("scripted", "scripted_stream")))
own_gateway = live_gateway(CONFIG, "own_triton", drain_s="1")


@pytest.fixture(scope="module")
def client(own_gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_gateway.url, timeout=20) as client:
        yield client


def infer(client: httpx.Client, model: str = "shop", path: str = "", **given: Any) -> httpx.Response:
    """``given``: the scripts of the inputs, ``parameters`` and ``outputs``."""
    names = ("FIRST", "SECOND") if model == "shop" else ("PROMPT",)
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [json.dumps(given.pop(name.lower(), {}))]}
        for name in names
    ]
    return client.post(f"/v2/models/{model}{path}/infer", json={"inputs": inputs, **given})


def tensors_of(answer: httpx.Response) -> dict[str, tuple[str, list[int], list[Any]]]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: (each["datatype"], each["shape"], each["data"]) for each in answer.json()["outputs"]}


def test_metadata_config_and_the_index_describe_one_model(client: httpx.Client) -> None:
    described = client.get("/v2/models/shop").json()
    assert described["inputs"] == [
        {"name": "FIRST", "datatype": "BYTES", "shape": [1]},
        {"name": "SECOND", "datatype": "BYTES", "shape": [1]},
    ]
    assert described["outputs"][0] == {"name": "first.NUMBERS", "datatype": "FP32", "shape": [-1]}
    assert described["versions"] == ["1"]
    config = client.get("/v2/models/shop/versions/1/config").json()
    assert [each["data_type"] for each in config["output"]] == ["TYPE_FP32", "TYPE_STRING", "TYPE_FP32"]
    assert (config["max_batch_size"], config["model_transaction_policy"]) == (0, {"decoupled": False})
    assert client.get("/v2/models/shop/ready").json() == {"name": "shop", "ready": True}
    assert client.get("/v2/models/shop/stats").json() == {"model_stats": []}
    index = client.post("/v2/repository/index").json()
    assert [each["name"] for each in index] == ["shop", "story"]
    assert index[0] == {"name": "shop", "version": "1", "state": "READY"}


@pytest.mark.parametrize("path", ["/v2/models/hidden", "/v2/models/scripted", "/v2/models/shop/versions/2"])
def test_what_is_not_listed_is_not_served(client: httpx.Client, path: str) -> None:
    assert {client.get(f"{path}{each}").status_code for each in ("", "/config", "/stats")} == {404}
    assert client.get(f"{path}/ready").status_code == 400
    _, _, name, *version = path[1:].split("/")
    assert infer(client, "shop" if version else name, f"/{'/'.join(version)}" if version else "").status_code == 404


def test_infer_answers_all_or_the_listed_outputs(client: httpx.Client) -> None:
    answer = infer(client, id="7", second={"text": "hi", "numbers": [3]})
    assert tensors_of(answer) == {
        "first.NUMBERS": ("FP32", [2], [1.0, 2.0]),
        "second.TEXT": ("BYTES", [1], ["hi"]),
        "second.NUMBERS": ("FP32", [1], [3.0]),
    }
    assert {key: answer.json().get(key) for key in ("id", "model_name", "model_version", "parameters")} == {
        "id": "7",
        "model_name": "shop",
        "model_version": "1",
        "parameters": None,
    }
    assert "step;desc=" in answer.headers["server-timing"]
    some = infer(client, outputs=[{"name": "second.TEXT"}])
    assert tensors_of(some) == {"second.TEXT": ("BYTES", [1], ["hello"])}


def test_an_exit_is_typed_and_visible(client: httpx.Client, own_gateway: GatewayProcess) -> None:
    answer = infer(client, first={"numbers": []})
    assert tensors_of(answer) == {
        "first.NUMBERS": ("FP32", [0], []),
        "second.TEXT": ("BYTES", [0], []),
        "second.NUMBERS": ("FP32", [0], []),
    }
    assert answer.json()["parameters"] == {"early_exit": "nothing_to_do"}
    (line,) = own_gateway.log_lines(answer.headers["x-request-id"])
    assert (line["outcome"], line["early_exit"]) == ("early_exit", "nothing_to_do")
    late = infer(client, first={"numbers": [-1]}, outputs=[{"name": "first.NUMBERS"}])
    assert tensors_of(late) == {"first.NUMBERS": ("FP32", [1], [-1.0])}
    assert late.json()["parameters"] == {"early_exit": "low"}


def test_a_skipped_step_leaves_its_outputs_out(client: httpx.Client) -> None:
    assert tensors_of(infer(client, parameters={"mode": "short"})).keys() == {"first.NUMBERS"}


def test_tritons_own_client_reads_the_model(own_gateway: GatewayProcess) -> None:
    client = triton_http.InferenceServerClient(own_gateway.url.removeprefix("http://"))
    assert client.is_model_ready("shop")
    inputs = [triton_http.InferInput(name, [1], "BYTES") for name in ("FIRST", "SECOND")]
    for each in inputs:
        each.set_data_from_numpy(np.array(["{}"], np.object_))
    result = client.infer("shop", inputs)
    assert result.as_numpy("second.TEXT").tolist() == [b"hello"]
    assert result.get_response()["model_version"] == "1"
    client.close()


EXIT = {"error": {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[refused]"}}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"parameters": {"mode": 1}}, 400, "parameter 'mode' of 'shop' must be of the type BYTES."),
    ({"parameters": {"least": "10"}}, 400, "parameter 'least' of 'shop' must be of the type FP64."),
    ({"parameters": {"least": True}}, 400, "parameter 'least' of 'shop' must be of the type FP64."),
    ({"outputs": [{"name": "first.NUMBERS", "parameters": {"classification": 1}}]}, 400, "class result not available"),
    ({"outputs": [{"name": "NUMBERS"}]}, 400, "unexpected inference output 'NUMBERS' for model 'shop'"),
    ({"first": EXIT}, 400, "Step 'first': Model 'scripted' failed."),
    ({"second": {"raise": "no luck"}}, 500, "Step 'second': Model 'shop' failed"),
    ({"first": {"numbers": [1, 2, 3, 4], "shape": [2, 2]}}, 502, "Step 'first': Output 'NUMBERS' is FP32 [2,2]"),
]


@pytest.mark.parametrize(("given", "status", "detail"), REFUSED)
def test_what_is_refused(client: httpx.Client, given: dict[str, Any], status: int, detail: str) -> None:
    answer = infer(client, **given)
    assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert detail in answer.json()["error"]


def test_a_parameter_cannot_stand_for_a_tensor_of_a_step(client: httpx.Client) -> None:
    parameters = {"first.NUMBERS": -1.0, "second.TEXT": "forged", "FIRST": "{}"}
    answer = infer(client, first={"numbers": []}, parameters=parameters)
    assert answer.json()["parameters"] == {"early_exit": "nothing_to_do"}
    assert tensors_of(answer)["second.TEXT"] == ("BYTES", [0], [])


def generated(client: httpx.Client, path: str, texts: list[str], **members: Any) -> httpx.Response:
    script = json.dumps({"outputs": len(texts), "texts": [each.encode().hex() for each in texts]})
    return client.post(f"/v2/models/story/{path}", json={"PROMPT": script, "kind": "story", **members})


def test_generate_has_the_reason_beside_the_outputs(client: httpx.Client) -> None:
    whole = generated(client, "generate", ["good "])
    assert whole.json() == {"generate.TEXT": "good ", "model_name": "story", "model_version": "1"}
    for texts, kind, expected in ((["bad "], "story", ("bad ", "unsafe")), ([], "other", ([], "other_kind"))):
        answer = generated(client, "generate", texts, kind=kind).json()
        assert (answer["generate.TEXT"], answer["early_exit"]) == expected
    assert generated(client, "generate", ["a", "b"]).status_code == 400
    missing = client.post("/v2/models/story/generate", json={"PROMPT": "{}"})
    assert (missing.status_code, missing.json()["error"]) == (
        400,
        "parameter 'kind' of 'story' must be of the type BYTES.",
    )


def test_generate_stream_ends_with_the_reason(client: httpx.Client) -> None:
    events = [
        json.loads(line[6:])
        for line in generated(client, "generate_stream", ["good ", "bad ", "x"]).iter_lines()
        if line
    ]
    assert [(each.get("generate.TEXT"), each.get("early_exit")) for each in events] == [
        ("good ", None),
        ("bad ", None),
        (None, "unsafe"),
    ]
