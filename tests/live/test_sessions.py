"""Sessions over a real Triton, over HTTP, as streams and over WebSockets.

The answers prove that each session has its own state, that each step ran to its end, and that no place is lost.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.sessions import MODELS, STREAMED, kill_triton, wait_for_new_triton, write_models
from tests.toolkit.events import checked, events_in
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.nginx import documented_affinity, running_nginx
from tests.toolkit.processes import (
    GatewayProcess,
    configured_gateway,
    free_ports,
    live_gateway,
    live_triton,
    wait_until_ready,
)
from tests.toolkit.waiting import PATIENCE_S, eventually, until
from tests.toolkit.websocket_client import event_of, events_of, opened

EVERY = [*MODELS, "summing_chain"]
SAMPLE = {"NUMBER": 1, "COUNT": 1}
PIPELINES: dict[str, Any] = {
    **{name: {"model": name, "session": True, "sample": {"NUMBER": 1}} for name in EVERY},
    **{name: {"model": name, "session": True, "stream": True, "sample": SAMPLE} for name in STREAMED},
    "ending": {"model": "short", "session": {"end_inputs": {"NUMBER": 0}}},
    "few": {"model": "uint64_direct", "session": {"max_open": 2}},
    "ordinary": {"model": "uint64_direct", "stream": True},
    "meter": {
        "model": "uint64_oldest",
        "inputs": {"watts": {"tensor": "NUMBER"}},
        "outputs": {"sum": {"tensor": "SUM"}},
        "session": {"end_inputs": {"watts": 0}},
    },
    "whole": {"model": "streamed_oldest", "session": True, "sample": SAMPLE},
}


triton = live_triton(lambda folder: write_models(folder, [*EVERY, *STREAMED]), restarts=True, first_restart_s=0.2)
gateway = live_gateway(PIPELINES, ping_s="0.2")


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A client whose sessions have all ended when the test ends."""
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:
        yield client
    eventually(lambda: gateway.metric("open_sessions") == 0)


class Caller:
    """One session, and the sum that its answers must have."""

    def __init__(self, client: httpx.Client, pipeline: str) -> None:
        answer = client.post(f"/v1/pipelines/{pipeline}/sessions")
        assert answer.status_code == 201, answer.text
        self.opened = answer.json()
        self.url = answer.headers["Location"]
        self.client = client
        self.steps = self.sum = 0

    def send(self, number: int, count: int | None = None, **headers: str) -> httpx.Response:
        """With ``count`` it asks for a stream of so many sums."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = self.url if count is None else f"{self.url}/stream"
        return self.client.post(url, json=body_of(number, count), headers=named)

    def step(self, number: int, count: int | None = None, **headers: str) -> dict[str, Any]:
        """One step, whose outputs must have this session's sums and number of steps. Returns the last output."""
        answer = self.send(number, count, **headers)
        assert answer.status_code == 200, answer.text
        self.steps += 1
        assert answer.headers["X-Session-Step"] == str(self.steps)
        if count is None:
            outputs = [answer.json()]
        else:
            *events, end = checked(list(events_in(answer.text.splitlines())))
            assert (end.name, end.data["outputs"]) == ("done", count)
            outputs = [each.data for each in events]
        sums = [self.sum + number * each for each in range(1, (1 if count is None else count) + 1)]
        assert [(each["SUM"], each["STEPS"]) for each in outputs] == [(each, self.steps) for each in sums]
        self.sum = sums[-1] if sums else self.sum
        return outputs[-1] if outputs else {}

    def leave(self, number: int, count: int, sleep_s: float) -> None:
        """Leaves after the first output. The model adds all numbers of the step."""
        with self.client.stream("POST", f"{self.url}/stream", json=body_of(number, count, sleep_s)) as answer:
            assert next(events_in(answer.iter_lines())).data["SUM"] == self.sum + number
        self.steps, self.sum = self.steps + 1, self.sum + number * count

    def end(self, count: int | None = None) -> None:
        self.step(1, count, X_Session_End="true")

    def delete(self) -> int:
        return self.client.delete(self.url).status_code


def body_of(number: int, count: int | None = None, sleep_s: float = 0) -> dict[str, float]:
    return {"NUMBER": number} | ({} if count is None else {"COUNT": count}) | ({"SLEEP": sleep_s} if sleep_s else {})


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def test_the_commands_of_the_page_and_the_samples_of_the_catalog_run_a_session(gateway: GatewayProcess) -> None:
    (commands,) = [text for language, text in blocks_of(ROOT / "docs/how-to/sessions.md") if language == "sh"]
    samples = httpx.get(f"{gateway.url}/v1/pipelines/meter").json()["samples"]
    programs = [
        ["bash", "-ec", commands.replace("http://127.0.0.1:8080", gateway.url)],
        ["bash", "-ec", samples["curl"]],
        [sys.executable, "-c", samples["python"]],
    ]
    shown = [subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in programs]
    assert shown[0] == '{"sum":100}{"sum":250}'
    assert all("sum" in text for text in shown)
    assert "await fetch(url, {" in samples["javascript"]


def test_a_session_of_an_ensemble_gives_each_stateful_step_its_state(client: httpx.Client) -> None:
    session = Caller(client, "summing_chain")
    answers = [session.send(number).json() for number in (1, 10, 100)]
    assert [each["SUM"] for each in answers] == [1, 1 + 11, 1 + 11 + 111]
    assert session.send(0, X_Session_End="true").json()["SUM"] == 1 + 11 + 111 + 111
    failing = Caller(client, "summing_chain")
    assert code(failing.send(-1)) == (502, "model_error")
    assert code(failing.send(5)) == (410, "session_lost"), "the first model has a state, the second one has none"


@pytest.mark.parametrize("pipeline", MODELS)
def test_each_session_has_its_own_state(client: httpx.Client, pipeline: str) -> None:
    """Several times as many sessions as places, one after the other, with steps in between each other.

    There are never more sessions than places, and an end frees one.
    """

    def run(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(3):
            session = Caller(client, pipeline)
            assert 0 < session.opened["expires_in_s"] <= 30
            for _ in range(choice.randrange(2, 12)):
                session.step(choice.randrange(1000))
            session.end()
            assert code(session.send(1)) == (404, "unknown_session")

    callers = min(MODELS[pipeline].places, 16)
    with ThreadPoolExecutor(callers) as pool:
        assert list(pool.map(run, range(callers))) == [None] * callers
    if callers == MODELS[pipeline].places:
        sessions = [Caller(client, pipeline) for _ in range(callers)]
        refused = client.post(f"/v1/pipelines/{pipeline}/sessions")
        assert code(refused) == (429, "too_many_requests")
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        for each in sessions:
            each.step(7)
            each.end()


@pytest.mark.parametrize("pipeline", STREAMED)
def test_the_outputs_of_each_step_are_events(client: httpx.Client, pipeline: str) -> None:
    sessions = [Caller(client, pipeline) for _ in range(min(STREAMED[pipeline].places, 8))]
    for number, count in ((1, 3), (10, 1), (100, 0), (1000, 40)):
        for session in sessions:
            session.step(number, count)
    for session in sessions:
        session.end(1)
        assert code(session.send(1, 1)) == (404, "unknown_session")


def test_the_answers_of_a_session_over_http(client: httpx.Client, gateway: GatewayProcess) -> None:
    """Repeats, failures and refusals. Only answered and failed steps count. The log does not have the id."""
    session = Caller(client, "uint64_oldest")
    first = session.send(5, X_Session_Step="1")
    assert session.send(5, X_Session_Step="1").content == first.content
    assert code(session.send(-1, X_Session_Step="2")) == (502, "model_error")
    for body in ({"NUMBER": "x"}, {"NUMBER": 1, "sequence_id": 1}, {"NUMBER": 1, "ID": 1}):
        assert code(client.post(session.url, json=body)) == (422, "invalid_input")
    for header, value in (("X_Session_Step", "0"), ("X_Session_End", "maybe")):
        assert code(session.send(1, **{header: value})) == (400, "invalid_request")
    answer = session.send(7, X_Session_Step="4")
    assert (code(answer), answer.headers["X-Session-Step"]) == ((409, "step_out_of_turn"), "2")
    ends = {"X_Session_Step": "3", "X_Session_End": "true"}
    last = session.send(8, **ends)
    assert session.send(8, **ends).content == last.content
    assert last.json()["SUM"] == 5 - 1 + 8
    assert code(session.send(9)) == (404, "unknown_session")
    (line,) = gateway.log_lines(first.headers["X-Request-ID"])
    assert line["path"] == "/v1/sessions/***"

    def ended() -> list[tuple[object, object]]:
        lines = [line for line in gateway.json_lines() if line["message"] == "session ended"]
        return [(line["pipeline"], line["steps"]) for line in lines]

    eventually(lambda: ("uint64_oldest", 3) in ended())
    assert session.opened["id"] not in gateway.log


def test_failures_and_refusals_of_streamed_steps(client: httpx.Client) -> None:
    """After the first output an error is an event, before it a status. A refused request is no step."""
    session, whole = Caller(client, "streamed_oldest"), Caller(client, "whole")
    outputs = checked(list(events_in(session.send(-1, 3).text.splitlines())))
    assert [each.name for each in outputs] == ["output", "output", "error"]
    assert outputs[-1].data["code"] == "model_error"
    assert code(session.send(-1, 1, X_Session_Step="2")) == (502, "model_error")
    assert code(session.send(-1, 1, X_Session_Step="2")) == (409, "step_out_of_turn")
    assert code(session.send(1, 1, Last_Event_ID="1")) == (400, "invalid_request")
    assert code(session.send(1, 1, X_Session_Step="0")) == (400, "invalid_request")
    assert code(client.post(f"{session.url}/stream", json={"NUMBER": "x"})) == (422, "invalid_input")
    answer = whole.send(1, 1)
    assert (code(answer), answer.json()["detail"]) == (
        (400, "invalid_request"),
        "This pipeline does not stream: POST /v1/sessions/{id} returns its whole answer.",
    )
    for path in ("/v1/pipelines/streamed_oldest/stream", "/v1/pipelines/streamed_oldest"):
        answer = client.post(path, json=body_of(1, 1))
        assert "/v1/pipelines/streamed_oldest/sessions" in answer.json()["hint"]
    session.steps, session.sum = 2, -4
    session.step(6, 2)
    session.end(1)
    assert whole.delete() == 204


def test_a_step_runs_to_its_end_when_its_caller_leaves(client: httpx.Client, gateway: GatewayProcess) -> None:
    """The next step waits for its turn, and its sums have all numbers of the step before it.

    The last caller leaves before the first output, while the model works for another session; the outputs are more than
    the gateway keeps for a reader.
    """
    session, other = Caller(client, "streamed_oldest"), Caller(client, "streamed_oldest")
    session.step(1, 2)
    for _ in range(3):
        session.leave(5, 8, 0.05)
        session.step(7, 2)
    session.leave(5, 20, 0.05)
    session.step(7, 2)
    with client.stream("POST", f"{other.url}/stream", json=body_of(1, 2, 1.5)) as answer:
        assert next(events_in(answer.iter_lines())).name == "output"
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{session.url}/stream", json=body_of(5, 4000), timeout=0.3)
    session.steps, session.sum = session.steps + 1, session.sum + 5 * 4000
    other.steps, other.sum = 1, 2
    for each in (session, other):
        each.end(1)
    left = [line for line in gateway.json_lines() if line.get("outcome") == "cancelled"]
    assert {(line["path"], line["transport"], line["pipeline"]) for line in left[-4:]} == {
        ("/v1/sessions/***/stream", "stream", "streamed_oldest")
    }


def has_place(client: httpx.Client, pipeline: str) -> bool:
    answer = client.post(f"/v1/pipelines/{pipeline}/sessions")
    if answer.status_code == 201:
        client.delete(answer.headers["Location"])
    return answer.status_code == 201


def test_only_end_inputs_free_the_sequence_at_once(client: httpx.Client, gateway: GatewayProcess) -> None:
    """The model ``short`` has one place. Its next session finds no state that was left.

    Without ``end_inputs`` the place is taken until Triton forgets the sequence.
    """
    for _ in range(3):
        eventually(lambda: has_place(client, "ending"))
        session = Caller(client, "ending")
        assert session.step(5)["OPEN"] == 1
        assert session.delete() == 204
        assert code(session.send(1)) == (404, "unknown_session")
        assert session.delete() == 404
    assert gateway.metric("sessions_total", pipeline="ending", reason="deleted") >= 3
    eventually(lambda: has_place(client, "short"))
    session = Caller(client, "short")
    session.step(5)
    assert session.delete() == 204
    assert not has_place(client, "short")
    eventually(lambda: has_place(client, "short"))
    again = Caller(client, "short")
    again.step(6)
    again.end()


def test_a_model_that_is_loaded_again_ends_its_sessions(
    client: httpx.Client, triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    used, unused = Caller(client, "uint64_oldest"), Caller(client, "uint64_oldest")
    used.step(5)
    used.step(6)
    for change in ("unload", "load"):
        url = f"{triton.http_url}/v2/repository/models/uint64_oldest/{change}"
        httpx.post(url, timeout=PATIENCE_S).raise_for_status()
    wait_until_ready(gateway)
    for _ in range(2):
        answer = used.send(7)
        assert (code(answer), answer.headers["X-Session-Step"]) == ((410, "session_lost"), "2")
        assert "The last answered step is 2." in answer.json()["detail"]
    unused.step(5)
    unused.end()
    assert Caller(client, "uint64_oldest").delete() == 204


def oip_calls(client: httpx.Client, model: str, sequence_id: Any) -> Iterator[httpx.Response]:
    """The same request as tensors in JSON, as tensors in bytes, and as values."""
    parameters = {"sequence_id": sequence_id, "sequence_start": True, "sequence_end": True}
    shape = [1, 1] if model not in MODELS or MODELS[model].batch else [1]
    tensor = {"name": "NUMBER", "datatype": "INT64", "shape": shape}
    yield client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor | {"data": [5]}], "parameters": parameters})
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 8}}], "parameters": parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    yield client.post(f"/v2/models/{model}/infer", content=head + (5).to_bytes(8, "little"), headers=headers)
    yield client.post(f"/v2/models/{model}/generate", json={"NUMBER": 5, **parameters})
    yield client.post(f"/v2/models/{model}/generate_stream", json={"NUMBER": 5, "parameters": parameters})


OF_SESSIONS = "the gateway makes itself for this model"
NO_IDS = (0, -1, 2**64, 2**200, 1.5, True, None, [1], {"a": 1}, "", "\u00fc" * 65, "x" * 129, "a\0b")
"""Ids that no model takes. `tests/core/test_model.py` has those of each datatype."""
IDS: dict[str, tuple[tuple[int | str, ...], tuple[int | str, ...], tuple[int | str, ...]]] = {
    "uint64_direct": ((2**62, 2**63 - 1, 2**30), (7, 2**62 - 1, 2**64 - 1), ("x", "x" * 126)),
    "int64_oldest": ((2**62, 2**63 - 1), (7, 2**30), (2**63, "7")),
    "uint32_direct": ((2**30,), (7, 2**32 - 1), (2**32, 2**32 + 7)),
    "int32_oldest": ((2**30, 2**31 - 1), (7, 2**30 - 1), (2**31, "x")),
    "text_direct": (("triton-gateway-session-" + "x" * 105,), ("x" * 128,), (7, "x" * 125, "x" * 127)),
    "plain_direct": ((), (7, 2**64 - 1, "x", "x" * 127), ()),
    "summing_chain": ((), (7,), (2**32, "x")),
}
"""Model -> ids of its sessions (short ones also of a step of an ensemble), free ones, and ones of another type."""


@pytest.mark.parametrize("model", IDS)
def test_only_ids_that_are_free_and_fit_the_model_reach_it(
    client: httpx.Client, gateway: GatewayProcess, model: str
) -> None:
    """An id of another type overwrites the memory of Triton 2.51. The model checks that it has got the right id."""
    of_sessions, free, wrong = IDS[model]
    calls = gateway.metric("triton_calls_total", model=model)
    for sequence_id in (*of_sessions, *wrong, *NO_IDS):
        for answer in oip_calls(client, model, sequence_id):
            assert answer.status_code == 400, sequence_id
            assert (OF_SESSIONS in answer.text) is (sequence_id in of_sessions), sequence_id
    assert gateway.metric("triton_calls_total", model=model) == calls
    for sequence_id in free:
        for answer in oip_calls(client, model, sequence_id):
            assert (answer.status_code, "error" in answer.text) == (200, False), answer.text


def test_a_request_without_a_sequence_says_what_to_send(client: httpx.Client) -> None:
    answer = client.post("/v2/models/summing_chain/generate", json={"NUMBER": 5})
    assert answer.status_code == 400
    assert "'uint64_direct' must specify a non-zero or non-empty correlation ID" in answer.json()["error"]
    assert "`sequence_id`, an integer of 1 to 4294967295" in answer.json()["error"]
    answer = client.post("/v2/models/uint64_direct/generate", json={"NUMBER": 5, "sequence_id": 123456})
    assert (answer.status_code, "`sequence_start: true`" in answer.text) == (400, True)
    assert "123456" not in answer.text
    body = {"NUMBER": 5}
    for answer in (
        client.post("/v1/pipelines/ordinary", json=body),
        client.post("/v1/pipelines/ordinary/stream", json=body),
        client.post("/v1/streams", json={"pipeline": "ordinary", "inputs": body}),
    ):
        assert answer.status_code == 400, answer.text
        assert "needs a session" in answer.text
        assert "/v2/models/uint64_direct/infer" in answer.text


def test_the_document_describes_sessions_and_their_streams(gateway: GatewayProcess) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    paths = document["paths"]
    assert list(paths["/v1/pipelines/whole"]) == ["get"]
    assert paths["/v1/pipelines/whole/sessions"]["post"]["operationId"] == "open_session_whole"
    assert "501" in paths["/v1/pipelines/whole/sessions"]["post"]["responses"]
    assert set(paths["/v1/sessions/{id}"]) == {"post", "delete"}
    assert {"404", "409", "410", "429"} <= set(paths["/v1/sessions/{id}"]["post"]["responses"])
    assert "streamed_oldest" not in json.dumps(paths["/v1/streams"])
    described = httpx.get(f"{gateway.url}/v1/pipelines/streamed_oldest").json()
    assert (described["streams"], described["sessions"]) == (False, True)
    assert "/v1/pipelines/streamed_oldest/stream" not in paths
    step = paths["/v1/sessions/{id}/stream"]["post"]
    assert {"400", "404", "409", "410", "422", "429"} <= set(step["responses"])
    assert "text/event-stream" in step["responses"]["200"]["content"]


async def step(client: ClientConnection, number: int, value: int) -> dict[str, Any]:
    """Sends a step over a WebSocket. Returns its only output."""
    await client.send(json.dumps({"NUMBER": value}))
    (_, output), (name, done) = await events_of(client, number)
    assert (name, done["outputs"]) == ("done", 1)
    values: dict[str, Any] = output
    return values


async def test_the_drain_waits_for_open_sessions(triton: EmbeddedTriton, tmp_path: Path) -> None:
    """One is over HTTP, and one over a WebSocket."""
    with configured_gateway(triton, tmp_path, PIPELINES, drain_s="60") as gateway:
        async with opened(gateway, "int64_oldest") as socket:
            await step(socket, 1, 1)
            await asyncio.to_thread(drain_with_a_session, gateway)
            assert (await step(socket, 2, 1))["SUM"] == 2
            assert gateway.process.poll() is None
        await asyncio.to_thread(gateway.process.wait, PATIENCE_S)


def drain_with_a_session(gateway: GatewayProcess) -> None:
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:
        session = Caller(client, "int64_oldest")
        session.step(1)
        gateway.process.send_signal(signal.SIGTERM)
        eventually(lambda: client.get("/health/ready").json()["status"] == "draining")
        assert code(client.post("/v1/pipelines/int64_oldest/sessions")) == (503, "draining")
        session.step(2)
        session.end()


def test_only_the_key_that_opened_a_session_can_use_it(triton: EmbeddedTriton, tmp_path: Path) -> None:
    keys = str(write_keys(tmp_path / "keys.yaml", entry("alice"), entry("bob")))
    with (
        configured_gateway(triton, tmp_path, PIPELINES, api_keys_file=keys) as gateway,
        httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client,
    ):
        url = client.post("/v1/pipelines/int64_oldest/sessions", headers=bearer("alice")).headers["Location"]
        for method, path in (("POST", f"{url}/stream"), ("POST", url), ("DELETE", url)):
            body = {"NUMBER": 1} if method == "POST" else None
            assert code(client.request(method, path, json=body)) == (401, "unauthenticated")
            assert code(client.request(method, path, json=body, headers=bearer("bob"))) == (403, "forbidden")
        assert client.post(url, json={"NUMBER": 1}, headers=bearer("alice")).json()["SUM"] == 1
        assert client.delete(url, headers=bearer("alice")).status_code == 204


async def test_several_workers_have_sessions_over_websockets_only(triton: EmbeddedTriton, tmp_path: Path) -> None:
    with configured_gateway(triton, tmp_path, PIPELINES, workers="2") as gateway:
        await asyncio.to_thread(check_http_is_refused, gateway)
        sockets = [await opened(gateway, "text_oldest") for _ in range(16)]
        for number in range(1, 4):
            for value, socket in enumerate(sockets):
                assert (await step(socket, number, value))["SUM"] == number * value
        assert await asyncio.to_thread(gateway.metric, "open_sessions") == len(sockets)
        for socket in sockets:
            await socket.close()
        await until(lambda: gateway.metric("open_sessions") == 0)


def check_http_is_refused(gateway: GatewayProcess) -> None:
    """Each worker refuses sessions over HTTP at once, and logs it once."""
    limits = httpx.Limits(max_keepalive_connections=0)  # any worker may accept the next connection
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, limits=limits) as client:
        for _ in range(8):
            refused = client.post("/v1/pipelines/int64_oldest/sessions")
            assert code(refused) == (501, "http_sessions_off")
            assert "GATEWAY_WORKERS=1" in refused.json()["hint"]
            assert "/v1/pipelines/int64_oldest/session" in refused.json()["hint"]
        assert code(client.post("/v1/pipelines/ordinary/sessions")) == (400, "invalid_request")
        assert code(client.post("/v1/sessions/abc", json={"NUMBER": 1})) == (404, "unknown_session")
    assert sum("http_sessions_off" in str(line["message"]) for line in gateway.json_lines()) == 1


def test_every_step_of_a_client_reaches_its_gateway(triton: EmbeddedTriton, tmp_path: Path, require: Require) -> None:
    """Two gateways behind nginx as documented. Clients have different addresses and a connection for each request."""
    (port,) = free_ports(1)
    url, one_each = "/v1/pipelines/int32_oldest/sessions", httpx.Limits(max_keepalive_connections=0)
    with (
        configured_gateway(triton, tmp_path / "first", PIPELINES) as first,
        configured_gateway(triton, tmp_path / "second", PIPELINES) as second,
        running_nginx(
            tmp_path, require, port, documented_affinity(port, *(urlsplit(each.url).netloc for each in (first, second)))
        ),
    ):
        sessions = []
        for number in range(1, 33):
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}", limits=one_each)
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=PATIENCE_S)
            sessions.append((client, client.post(url).headers["Location"]))
        assert min(gateway.metric("open_sessions") for gateway in (first, second)) > 0
        for number in range(1, 4):
            answers = [client.post(session, json={"NUMBER": 2}) for client, session in sessions]
            assert [(each.status_code, each.json()["SUM"]) for each in answers] == [(200, 2 * number)] * len(sessions)
        for client, session in sessions:
            assert client.delete(session).status_code == 204
            client.close()


async def run_session(gateway: GatewayProcess, pipeline: str, seed: int) -> None:
    """Sends all steps at once: they run in order. A message that is no step changes no state."""
    values = random.Random(seed).choices(range(1000), k=10)
    async with opened(gateway, pipeline) as client:
        await client.send('{"NUMBER": "five"}')
        for value in values:
            await client.send(json.dumps({"NUMBER": value}))
        ((name, problem),) = await events_of(client, 1)
        assert (name, problem["code"]) == ("error", "invalid_input")
        for number, total in enumerate(accumulate(values), 1):
            (_, answer), _ = await events_of(client, number + 1)
            assert (answer["SUM"], answer["STEPS"]) == (total, number)


@pytest.mark.parametrize("pipeline", ["text_direct", "uint64_oldest"])
async def test_each_websocket_has_its_own_state(gateway: GatewayProcess, pipeline: str) -> None:
    await asyncio.gather(*[run_session(gateway, pipeline, seed) for seed in range(MODELS[pipeline].places)])
    await until(lambda: gateway.metric("open_sessions") == 0)


async def test_the_end_of_a_websocket_frees_the_place_of_its_session(gateway: GatewayProcess) -> None:
    """The place of a session without a step is free at once. A session that expires ends its idle WebSocket."""
    clients = [await opened(gateway, "few") for _ in range(2)]
    with pytest.raises(InvalidStatus) as refused:
        await opened(gateway, "few")
    assert refused.value.response.status_code == 429
    await asyncio.gather(*[client.close() for client in clients])
    await until(lambda: gateway.metric("open_sessions") == 0)
    async with opened(gateway, "few") as client:
        assert (await step(client, 1, 1))["SUM"] == 1
    async with opened(gateway, "short") as client:
        await step(client, 1, 1)
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert gateway.metric("open_sessions", pipeline="short") == 0
        assert (client.close_code, client.close_reason) == (4404, "unknown_session")


def kill_below_a_stream(session: Caller, triton: EmbeddedTriton) -> int:
    with session.client.stream("POST", f"{session.url}/stream", json=body_of(5, 1000, 0.1)) as answer:
        events = events_in(answer.iter_lines())
        assert next(events).name == "output"
        killed = kill_triton(triton)
        last = list(events)[-1]
    assert (last.name, last.data["code"]) == ("error", "session_lost")
    assert "The last answered step is 1." in last.data["detail"]
    lost = session.send(1, 1)
    assert (code(lost), lost.headers["X-Session-Step"]) == ((410, "session_lost"), "1")
    return killed


async def test_a_killed_triton_ends_a_stream_and_a_websocket_with_their_sessions(
    client: httpx.Client, gateway: GatewayProcess, triton: EmbeddedTriton
) -> None:
    """Also a session without a step under way. New sessions can be opened then."""
    session, idle = Caller(client, "streamed_oldest"), Caller(client, "streamed_oldest")
    for each in (session, idle):
        each.step(1, 1)
    async with opened(gateway, "streamed_direct") as socket:
        await socket.send(json.dumps(body_of(5, 1000, 0.1)))
        assert (await event_of(socket))[0] == "output"
        killed = await asyncio.to_thread(kill_below_a_stream, session, triton)
        name, problem = (await events_of(socket, 1))[-1]
        assert (name, problem["code"]) == ("error", "session_lost")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (4410, "session_lost")
    await asyncio.to_thread(wait_for_new_triton, gateway, triton, killed)
    assert code(idle.send(1, 1)) == (410, "session_lost")
    Caller(client, "streamed_oldest").end(1)
