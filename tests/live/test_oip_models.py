"""Compares the documents of ``/v2`` about models, ``generate`` and ``generate_stream`` with Triton's HTTP API."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app import __version__
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import Both, both_at
from tests.toolkit.processes import GatewayProcess

EXPOSED = ["typed_echo", "batched_echo", "repeat_text", "scripted", "scripted_chain", "text_generate", "ocr_bls"]
SHARED_MEMORY = ("/status", "/region/a/status", "/region/a/register", "/unregister")
ADMINISTRATION = [
    *(f"/v2/repository/models/scripted/{change}" for change in ("load", "unload")),
    *(f"/v2/{kind}sharedmemory{end}" for kind in ("system", "cuda") for end in SHARED_MEMORY),
    *("/v2/trace/setting", "/v2/models/scripted/trace/setting", "/v2/logging", "/v2/models", "/v2/"),
]


@pytest.fixture(scope="module")
def both(triton: EmbeddedTriton, gateway: GatewayProcess) -> Iterator[Both]:
    with both_at(triton.http_url, gateway.url) as clients:
        yield clients


def known_to_triton(ours: Any, theirs: Any) -> Any:
    """Returns ``ours`` without the fields that Triton 2.51 does not have: the client library has newer messages."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: known_to_triton(ours[key], theirs[key]) for key in ours if key in theirs}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [known_to_triton(one, other) for one, other in zip(ours, theirs, strict=True)]
    return ours


@pytest.mark.parametrize("model", EXPOSED)
def test_metadata_and_configuration_match_triton(both: Both, model: str) -> None:
    for path in ("", "/config", "/versions/1", "/versions/1/config"):
        theirs, ours = both.get(f"/v2/models/{model}{path}")
        assert (theirs.status_code, ours.status_code) == (200, 200)
        assert known_to_triton(ours.json(), theirs.json()) == theirs.json()
        added = set(ours.json()) - set(theirs.json())
        assert not added, "the gateway adds fields to the message of Triton"


def test_statistics_match_triton_and_include_only_exposed_models(both: Both) -> None:
    theirs, ours = both.get("/v2/models/scripted_tail/stats")
    assert ours.json() == theirs.json()
    assert ours.json()["model_stats"][0]["name"] == "scripted_tail"
    theirs, ours = both.get("/v2/models/stats")
    names = {each["name"] for each in ours.json()["model_stats"]}
    assert "scripted_chain" in names
    assert "stream_nested" not in names
    assert names < {each["name"] for each in theirs.json()["model_stats"]}


def test_the_index_lists_the_exposed_models(both: Both) -> None:
    for body in (b"", b"{}", b'{"ready":true}'):
        theirs, ours = both.post("/v2/repository/index", body)
        rows = {row["name"]: row for row in ours.json()}
        assert set(EXPOSED) < set(rows)
        assert "stream_nested" not in rows
        assert all(row in theirs.json() for row in rows.values())
    assert [answer.status_code for answer in both.post("/v2/repository/index", b"[1")] == [500, 400]


def test_health_is_200_with_the_body_that_kserve_reads(both: Both) -> None:
    bodies: dict[str, Any] = {"health/live": {"live": True}, "health/ready": {"ready": True}}
    of_model = {"name": "scripted", "ready": True}
    bodies |= {"models/scripted/ready": of_model, "models/scripted/versions/1/ready": of_model}
    for path, body in bodies.items():
        theirs, ours = both.get(f"/v2/{path}")
        assert (theirs.status_code, ours.status_code) == (200, 200)
        assert (theirs.content, ours.json()) == (b"", body)


def test_unknown_models_and_versions_are_404(both: Both) -> None:
    for path in ("/v2/models/nope/ready", "/v2/models/scripted/versions/7/ready"):
        theirs, ours = both.get(path)
        assert (theirs.status_code, theirs.json()) == (ours.status_code, ours.json())
        assert ours.json() == {"error": "Model version not ready"}
    for model in ("nope", "scripted/versions/7", "scripted/versions/x"):
        for document in ("", "/config"):
            theirs, ours = both.get(f"/v2/models/{model}{document}")
            assert (theirs.status_code, ours.status_code) == (404, 404)
            assert model.endswith("x") or ours.json() == theirs.json()
    for document in ("", "/config", "/stats", "/infer", "/generate", "/generate_stream"):
        method = "POST" if document in {"/infer", "/generate", "/generate_stream"} else "GET"
        answer = both.gateway.request(method, f"/v2/models/stream_nested{document}", json={})
        assert answer.status_code == 404
        assert answer.json()["error"].startswith("Request for unknown model"), "it is not exposed"


def test_server_metadata_has_the_name_and_the_extensions(both: Both) -> None:
    theirs, ours = both.get("/v2")
    assert ours.json().keys() == theirs.json().keys()
    assert (ours.json()["name"], ours.json()["version"]) == ("triton-gateway", __version__)
    assert {"binary_tensor_data", "classification", "parameters"} <= set(ours.json()["extensions"])


def test_administration_paths_are_404(both: Both) -> None:
    for path in ADMINISTRATION:
        for method in ("GET", "POST"):
            answer = both.gateway.request(method, path, json={})
            assert answer.status_code == 404, (method, path)
            assert list(answer.json()) == ["error"]


GENERATE = "/v2/models/repeat_text/generate"
STREAM = "/v2/models/repeat_text/generate_stream"
ONE = {"PROMPT": "hello world", "STREAM": False}
MANY = {"PROMPT": ["hello world"], "STREAM": True, "REPETITION": 3}
DATA = {"TEXT": "hello world", "model_name": "repeat_text", "model_version": "1"}


def body_of(request: Any) -> bytes:
    return request if isinstance(request, bytes) else json.dumps(request).encode()


def events_of(answer: httpx.Response) -> list[Any]:
    """Checks that each event consists of ``data: <JSON>`` and an empty line, and returns the JSON of the events."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = answer.content.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def same_object(both: Both, request: Any, path: str = GENERATE) -> Any:
    theirs, ours = both.post(path, body_of(request))
    assert (theirs.status_code, ours.status_code) == (200, 200), (theirs.content, ours.content)
    assert ours.headers["content-type"] == theirs.headers["content-type"] == "application/json"
    assert ours.json() == theirs.json()
    return ours.json()


def same_events(both: Both, request: Any, path: str = STREAM) -> list[Any]:
    theirs, ours = both.post(path, body_of(request))
    assert (theirs.status_code, ours.status_code) == (200, 200), (theirs.content, ours.content)
    assert events_of(ours) == events_of(theirs)
    return events_of(ours)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Inf"])
def test_floats_may_have_literals(both: Both, literal: str) -> None:
    path = "/v2/models/typed_echo/generate"
    for body in (f'{{"FP32": {literal}, "INT32": 1}}', f'{{"parameters": {{"FP32": [{literal}]}}, "INT32": 1}}'):
        theirs, ours = both.post(path, body.encode())
        assert (theirs.status_code, ours.status_code) == (200, 200), ours.content
        assert ours.json() == theirs.json() | {"FP32_OUT": None}
    for body in (f'{{"INT32": {literal}}}', f'{{"BYTES": {literal}}}', f'{{"FP32": 1, "x": {literal}}}'):
        assert both.post(path, body.encode())[1].status_code == 400


def test_generate(both: Both) -> None:
    assert same_object(both, ONE) == DATA
    assert same_object(both, {**ONE, "STREAM": True}) == DATA
    assert same_object(both, {**ONE, "id": "7"}, "/v2/models/repeat_text/versions/1/generate") == {**DATA, "id": "7"}


def test_generate_stream(both: Both) -> None:
    assert same_events(both, MANY) == [DATA] * 3
    assert same_events(both, ONE) == [DATA]
    assert same_events(both, {**MANY, "id": "7"}, "/v2/models/repeat_text/versions/1/generate_stream")[0]["id"] == "7"


def test_responses_are_sent_immediately(both: Both) -> None:
    request = {**MANY, "REPETITION": 2, "DELAY": 0.5}
    with both.gateway.stream("POST", STREAM, json=request) as answer:
        times = [time.monotonic() for _ in answer.iter_bytes()]
    assert times[1] - times[0] > 0.3


REFUSED: dict[str, tuple[int, list[Any]]] = {
    "but got 0 inputs": (400, [{}, {"abc": 123}]),
    "but got 1 inputs": (400, [{"PROMPT": "hello"}, {"STREAM": False}, {"STREAM": False, "other": "param"}]),
    "already exists in request": (
        400,
        [
            b'{"PROMPT": "hello", "STREAM": false, "PROMPT": "duplicate"}',
            b'{"PROMPT": "hello", "STREAM": false, "STREAM": false}',
            b'{"PROMPT": "hello", "STREAM": false, "parameters": {"PROMPT": "b"}}',
        ],
    ),
    "invalid type": (
        400,
        [ONE | each for each in ({"PARAMS": {"P": 0}}, {"P": [1]}, {"P": None}, {"parameters": {"x": {"y": 1}}})],
    ),
    "": (
        500,
        [
            ONE | each
            for each in (
                *({"PROMPT": 123}, {"STREAM": "false"}, {"PROMPT": True, "STREAM": 123}, {"PROMPT": {"USER": "a"}}),
                *({"PROMPT": None}, {"input_ids": [1.5]}, {"input_ids": [[1, 2]]}, {"scale": ["a"]}, {"scale": None}),
                *({"parameters": None}, {"parameters": [1]}, {"id": 4}),
            )
        ],
    ),
}
"""What both say -> the status of Triton, and the requests. The status of the gateway is 400."""


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize("text", REFUSED)
def test_wrong_requests_are_400(both: Both, path: str, text: str) -> None:
    status, requests = REFUSED[text]
    for request in requests:
        theirs, ours = both.post(path, body_of(request))
        assert (theirs.status_code, ours.status_code) == (status, 400), request
        assert text in theirs.json()["error"]
        assert text in ours.json()["error"]
        assert list(ours.json()) == ["error"]
        assert ours.headers["content-type"] == "application/json"
    for body in (b"nope", b"[]", b"", b'{"PROMPT":', b'{"a":' + b"[" * 99 + b"]" * 99 + b"}"):
        answer = both.gateway.post(path, content=body)
        assert (answer.status_code, list(answer.json())) == (400, ["error"]), body


def test_an_error_has_a_status_or_is_an_event_after_a_response(both: Both) -> None:
    failing = {**MANY, "REPETITION": 0, "FAIL_LAST": True}
    theirs, ours = both.post(STREAM, body_of(failing))
    assert (theirs.status_code, ours.status_code) == (400, 400)
    assert events_of(theirs) == [{"error": "An Error Occurred"}]
    assert events_of(ours) == [{"error": "Model 'repeat_text' failed."}]
    theirs, ours = both.post(GENERATE, body_of(failing))
    assert (theirs.status_code, ours.status_code) == (400, 400)
    assert ours.json() == {"error": "Model 'repeat_text' failed."}
    theirs, ours = both.post(STREAM, body_of({**MANY, "REPETITION": 1, "FAIL_LAST": True}))
    assert (theirs.status_code, ours.status_code) == (200, 200)
    assert events_of(theirs) == [DATA, {"error": "An Error Occurred"}]
    assert events_of(ours) == [DATA, {"error": "Model 'repeat_text' failed."}]


def test_generate_needs_exactly_one_response(both: Both) -> None:
    """The status of Triton for this error is 200. A stream may have no response."""
    assert same_events(both, {**MANY, "REPETITION": 0}) == []
    for count in (0, 2):
        theirs, ours = both.post(GENERATE, body_of({**MANY, "REPETITION": count}))
        assert (theirs.status_code, ours.status_code) == (200, 400)
        for answer in (theirs, ours):
            assert "generate expects model to produce exactly 1 response" in answer.json()["error"]


def test_parameters_reach_the_model(both: Both) -> None:
    parameters = {"SHOW": True, "x": 1, "y": 1.5, "z": "s", "b": False}
    nested = same_object(both, {**ONE, "parameters": parameters})
    flat = same_object(both, {**ONE, **parameters})
    assert json.loads(nested["PARAMETERS"]) == json.loads(flat["PARAMETERS"]) == parameters
    assert same_events(both, {**MANY, "REPETITION": 1, "parameters": {"REPETITION_": 3}}) == [DATA]
    rest = {name: value for name, value in MANY.items() if name != "REPETITION"}
    assert same_events(both, {**rest, "parameters": {"REPETITION": 3}}) == [DATA] * 3
    assert same_object(both, {"STREAM": False, "parameters": {"PROMPT": "hello world"}}) == DATA


SHAPED: list[dict[str, Any]] = [
    *({"input_ids": each} for each in ([1, 2, 3], 7, [])),
    *({"scale": each} for each in ([0.5, 1.25], 2)),
    *({"grid": each} for each in ([], [1, 2], [1, 2, 3, 4, 5, 6])),
    {"STREAM": [False]},
]


def test_the_number_of_elements_defines_the_shape(both: Both) -> None:
    for changed in SHAPED:
        same_object(both, {**ONE, **changed})
        same_events(both, {**ONE, **changed})
    for wrong in ({"PROMPT": ["a", "b"]}, {"grid": [1]}, {"grid": [1, 2, 3]}):
        theirs, ours = both.post(GENERATE, body_of({**ONE, **wrong}))
        assert (theirs.status_code, ours.status_code) == (400, 400)
        assert "to tensor with proper shape" in ours.json()["error"]


def test_a_character_is_sent_when_its_last_byte_arrives(both: Both) -> None:
    """Triton sends the bytes of each response unchanged, which is not valid UTF-8."""
    script = json.dumps({"texts": ["61c3", "bc", "e2"]})
    theirs, ours = both.post("/v2/models/scripted_stream/generate_stream", body_of({"SCRIPT": script}))
    assert b'\xc3"' in theirs.content
    assert [event.get("TEXT") for event in events_of(ours)] == ["a", "ü", "", "\ufffd"]
