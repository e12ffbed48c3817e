"""Sessions over a real Triton: the answers prove that each session has its own state, and that no place is lost."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.sessions import MODELS, OpenedSession, code, session_client, sessions_triton, step
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.nginx import documented_affinity, running_nginx
from tests.toolkit.processes import GatewayProcess, configured_gateway, free_ports, live_gateway, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import opened

EVERY = [*MODELS, "summing_chain"]
PIPELINES = {
    **{name: {"model": name, "session": True, "sample": {"NUMBER": 1}} for name in EVERY},
    "ending": {"model": "short", "session": {"end_inputs": {"NUMBER": 0}}},
    "ordinary": {"model": "uint64_direct", "stream": True},
    "meter": {
        "model": "uint64_oldest",
        "inputs": {"watts": {"tensor": "NUMBER"}},
        "outputs": {"sum": {"tensor": "SUM"}},
        "session": {"end_inputs": {"watts": 0}},
    },
}


triton = sessions_triton(EVERY)
gateway = live_gateway(PIPELINES)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with session_client(gateway) as client:
        yield client


class Caller(OpenedSession):
    def step(self, number: int, **headers: str) -> dict[str, Any]:
        """One step, whose answer must have this session's sum and number of steps."""
        answer = self.send(number, **headers)
        assert answer.status_code == 200, answer.text
        self.steps, self.sum = self.steps + 1, self.sum + number
        values: dict[str, Any] = answer.json()
        assert (values["SUM"], values["STEPS"]) == (self.sum, self.steps)
        assert answer.headers["X-Session-Step"] == str(self.steps)
        return values

    def end(self) -> None:
        self.step(1, X_Session_End="true")

    def delete(self) -> int:
        return self.client.delete(self.url).status_code


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


def test_the_answers_of_a_session_over_http(client: httpx.Client) -> None:
    """Repeats, failures and refusals. Only answered and failed steps count."""
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


def has_place(client: httpx.Client, pipeline: str) -> bool:
    answer = client.post(f"/v1/pipelines/{pipeline}/sessions")
    if answer.status_code == 201:
        client.delete(answer.headers["Location"])
    return answer.status_code == 201


def test_end_inputs_free_the_sequence(client: httpx.Client, gateway: GatewayProcess) -> None:
    """The model ``short`` has one place. Its next session finds no state that was left."""
    for _ in range(3):
        eventually(lambda: has_place(client, "ending"))
        session = Caller(client, "ending")
        assert session.step(5)["OPEN"] == 1
        assert session.delete() == 204
        assert code(session.send(1)) == (404, "unknown_session")
        assert session.delete() == 404
    ended = gateway.metric("sessions_total", pipeline="ending", reason="deleted")
    assert ended >= 3


def test_without_end_inputs_the_place_is_taken_until_triton_forgets_the_sequence(client: httpx.Client) -> None:
    eventually(lambda: has_place(client, "short"))
    session = Caller(client, "short")
    session.step(5)
    assert session.delete() == 204
    assert not has_place(client, "short")
    eventually(lambda: has_place(client, "short"))
    again = Caller(client, "short")
    again.step(6)
    again.end()


def load(triton: EmbeddedTriton, model: str) -> None:
    for change in ("unload", "load"):
        httpx.post(f"{triton.http_url}/v2/repository/models/{model}/{change}", timeout=PATIENCE_S).raise_for_status()


def test_a_model_that_is_loaded_again_ends_its_sessions(
    client: httpx.Client, triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    used, unused = Caller(client, "uint64_oldest"), Caller(client, "uint64_oldest")
    used.step(5)
    used.step(6)
    load(triton, "uint64_oldest")
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


def test_the_log_has_no_id_of_a_session(client: httpx.Client, gateway: GatewayProcess) -> None:
    session = Caller(client, "plain_direct")
    session.step(1)
    answer = session.send(2)
    session.steps, session.sum = 2, 3
    session.end()
    (line,) = gateway.log_lines(answer.headers["X-Request-ID"])
    assert line["path"] == "/v1/sessions/***"

    def ended() -> list[dict[str, Any]]:
        return [line for line in gateway.json_lines() if line["message"] == "session ended"]

    eventually(lambda: any((each["pipeline"], each["steps"]) == ("plain_direct", 3) for each in ended()))
    assert session.opened["id"] not in gateway.log


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
        await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)


def check_http_is_refused(gateway: GatewayProcess) -> None:
    """Each worker refuses sessions over HTTP at once, and the log says so once."""
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
