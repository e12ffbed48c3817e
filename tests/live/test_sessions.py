"""Sessions over a real Triton: the answers prove that each session has its own state, and that no place is lost."""

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.session_models import MODELS
from tests.live.sessions import (
    OpenedSession,
    code,
    connections,
    kill_triton,
    session_client,
    sessions_gateway,
    sessions_triton,
    step,
)
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.nginx import documented_affinity, running_nginx
from tests.toolkit.processes import GatewayProcess, free_ports, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import opened

EVERY = [*MODELS, "summing_chain"]
PIPELINES = {
    **{name: {"model": name, "session": True, "sample": {"NUMBER": 1}} for name in EVERY},
    "ending": {"model": "short", "session": {"end_inputs": {"NUMBER": 0}}},
    "ordinary": {"model": "uint64_direct"},
    "meter": {
        "model": "uint64_oldest",
        "inputs": {"watts": {"tensor": "NUMBER"}},
        "outputs": {"sum": {"tensor": "SUM"}},
        "session": {"end_inputs": {"watts": 0}},
    },
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with sessions_triton(tmp_path_factory.mktemp("sessions"), models_venv, EVERY, restarts=True) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with sessions_gateway(triton, tmp_path_factory.mktemp("gateway"), PIPELINES) as process:
        yield process


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with session_client(gateway) as client:
        yield client


class Caller(OpenedSession):
    def send(self, number: int, *, sleep_s: float = 0, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"NUMBER": number} | ({"SLEEP": sleep_s} if sleep_s else {})
        return self.client.post(self.url, json=body, headers=headers)

    def step(self, number: int, **options: Any) -> dict[str, Any]:
        """One step, whose answer must have this session's sum and number of steps."""
        answer = self.send(number, **options)
        assert answer.status_code == 200, answer.text
        self.steps, self.sum = self.steps + 1, self.sum + number
        values: dict[str, Any] = answer.json()
        assert (values["SUM"], values["STEPS"]) == (self.sum, self.steps)
        assert answer.headers["X-Session-Step"] == str(self.steps)
        return values

    def end(self) -> None:
        self.step(1, headers={"X-Session-End": "true"})

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
    assert session.send(0, headers={"X-Session-End": "true"}).json()["SUM"] == 1 + 11 + 111 + 111
    failing = Caller(client, "summing_chain")
    assert code(failing.send(-1)) == (502, "model_error")
    assert code(failing.send(5)) == (410, "session_lost"), "the first model has a state, the second one has none"


@pytest.mark.parametrize("pipeline", MODELS)
def test_each_session_has_its_own_state(client: httpx.Client, pipeline: str) -> None:
    """Several times as many sessions as places, one after the other, with steps in between each other."""

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


def test_the_answers_of_a_session_over_http(client: httpx.Client) -> None:
    """Repeats, failures and refusals. Only answered and failed steps count."""
    session = Caller(client, "uint64_oldest")
    first = session.send(5, headers={"X-Session-Step": "1"})
    assert session.send(5, headers={"X-Session-Step": "1"}).content == first.content
    assert code(session.send(-1, headers={"X-Session-Step": "2"})) == (502, "model_error")
    for body in ({"NUMBER": "x"}, {"NUMBER": 1, "sequence_id": 1}, {"NUMBER": 1, "ID": 1}):
        assert code(client.post(session.url, json=body)) == (422, "invalid_input")
    for header, value in (("X-Session-Step", "0"), ("X-Session-End", "maybe")):
        assert code(session.send(1, headers={header: value})) == (400, "invalid_request")
    answer = session.send(7, headers={"X-Session-Step": "4"})
    assert (code(answer), answer.headers["X-Session-Step"]) == ((409, "step_out_of_turn"), "2")
    ends = {"X-Session-Step": "3", "X-Session-End": "true"}
    last = session.send(8, headers=ends)
    assert session.send(8, headers=ends).content == last.content
    assert last.json()["SUM"] == 5 - 1 + 8
    assert code(session.send(9)) == (404, "unknown_session")


@pytest.mark.parametrize("pipeline", ["text_direct", "uint64_oldest"])
def test_there_are_never_more_sessions_than_places(client: httpx.Client, pipeline: str) -> None:
    sessions = [Caller(client, pipeline) for _ in range(MODELS[pipeline].places)]
    for each in sessions:
        each.step(7)
    refused = client.post(f"/v1/pipelines/{pipeline}/sessions")
    assert code(refused) == (429, "too_many_requests")
    assert 1 <= int(refused.headers["Retry-After"]) <= 30
    sessions.pop().end()
    sessions.append(Caller(client, pipeline))
    for each in sessions:
        each.end()


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


def test_a_killed_triton_ends_its_sessions(
    client: httpx.Client, triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    """One session has a step under way, the other one has not."""
    running, idle = Caller(client, "uint64_oldest"), Caller(client, "uint64_oldest")
    running.step(1)
    idle.step(2)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(running.send(5, sleep_s=30)))
    thread.start()
    eventually(lambda: gateway.metric("requests_running_by_pipeline", pipeline="uint64_oldest") > 0)
    kill_triton(triton)
    thread.join()
    assert code(answers[0]) == (410, "session_lost")
    wait_until_ready(gateway)
    assert code(idle.send(3)) == (410, "session_lost")
    eventually(lambda: opens_and_steps(client))


def opens_and_steps(client: httpx.Client) -> bool:
    opened = client.post("/v1/pipelines/uint64_oldest/sessions")
    if opened.status_code != 201:
        return False
    url = opened.headers["Location"]
    step = client.post(url, json={"NUMBER": 1}, headers={"X-Session-End": "true"})
    client.delete(url)
    return step.status_code == 200 and step.json()["STEPS"] == 1


def oip_calls(client: httpx.Client, model: str, sequence_id: int | str) -> Iterator[httpx.Response]:
    """The same request as tensors in JSON, as tensors in bytes, and as values."""
    parameters = {"sequence_id": sequence_id, "sequence_start": True, "sequence_end": True}
    shape = [1, 1] if MODELS[model].batch else [1]
    tensor = {"name": "NUMBER", "datatype": "INT64", "shape": shape}
    yield client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor | {"data": [5]}], "parameters": parameters})
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 8}}], "parameters": parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    yield client.post(f"/v2/models/{model}/infer", content=head + (5).to_bytes(8, "little"), headers=headers)
    yield client.post(f"/v2/models/{model}/generate", json={"NUMBER": 5, **parameters})


@pytest.mark.parametrize(
    ("model", "of_sessions", "free"),
    [
        ("uint64_direct", (2**62, 2**63 - 1, 2**30), (7, 2**62 - 1, 2**63)),  # short ids: also a step of an ensemble
        ("int64_oldest", (2**62, 2**63 - 1), (7, 2**30)),
        ("int32_oldest", (2**30, 2**31 - 1), (7, 2**30 - 1)),
        ("text_direct", (("triton-gateway-session-" + "x" * 105),), ("x" * 128,)),
    ],
)
def test_the_ids_of_sessions_are_refused_under_v2(
    client: httpx.Client, model: str, of_sessions: tuple[int | str, ...], free: tuple[int | str, ...]
) -> None:
    for sequence_id in of_sessions:
        for answer in oip_calls(client, model, sequence_id):
            assert answer.status_code == 400
            assert "the gateway makes itself for this model" in answer.json()["error"]
    for sequence_id in free:
        for answer in oip_calls(client, model, sequence_id):
            assert answer.status_code == 200, answer.text


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


def test_only_the_key_that_opened_a_session_can_use_it(triton: EmbeddedTriton, tmp_path: Path) -> None:
    keys = str(write_keys(tmp_path / "keys.yaml", entry("alice"), entry("bob")))
    with (
        sessions_gateway(triton, tmp_path, PIPELINES, api_keys_file=keys) as gateway,
        httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client,
    ):
        url = client.post("/v1/pipelines/int64_oldest/sessions", headers=bearer("alice")).headers["Location"]
        calls: list[Callable[[dict[str, str]], httpx.Response]] = [
            lambda headers: client.post(url, json={"NUMBER": 1}, headers=headers),
            lambda headers: client.delete(url, headers=headers),
        ]
        stream = {"url": f"{url}/stream", "json": {"NUMBER": 1}}
        assert code(client.post(**stream)) == (401, "unauthenticated")
        assert code(client.post(**stream, headers=bearer("bob"))) == (403, "forbidden")
        for call in calls:
            assert code(call({})) == (401, "unauthenticated")
            assert code(call(bearer("bob"))) == (403, "forbidden")
            assert call(bearer("alice")).status_code in (200, 204)


@pytest.fixture(scope="module")
def two_workers(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with sessions_gateway(triton, tmp_path_factory.mktemp("two"), PIPELINES, workers="2") as process:
        yield process


def test_several_workers_refuse_sessions_over_http(two_workers: GatewayProcess) -> None:
    """Each worker refuses them at once, and the log says so once."""
    with connections(two_workers) as client:
        for _ in range(8):
            refused = client.post("/v1/pipelines/int64_oldest/sessions")
            assert code(refused) == (501, "http_sessions_off")
            assert "GATEWAY_WORKERS=1" in refused.json()["hint"]
            assert "/v1/pipelines/int64_oldest/session" in refused.json()["hint"]
        assert code(client.post("/v1/pipelines/ordinary/sessions")) == (400, "invalid_request")
        assert code(client.post("/v1/sessions/abc", json={"NUMBER": 1})) == (404, "unknown_session")
    assert two_workers.metric("open_sessions") == 0
    assert sum("http_sessions_off" in str(line["message"]) for line in two_workers.json_lines()) == 1


async def test_several_workers_have_sessions_over_websockets(two_workers: GatewayProcess) -> None:
    clients = [await opened(two_workers, "text_oldest") for _ in range(16)]
    for number in range(1, 4):
        for value, client in enumerate(clients):
            assert (await step(client, number, value))["SUM"] == number * value
    assert await asyncio.to_thread(two_workers.metric, "open_sessions") == len(clients)
    for client in clients:
        await client.close()
    await asyncio.to_thread(eventually, lambda: two_workers.metric("open_sessions") == 0)


def test_every_step_of_a_client_reaches_its_gateway(triton: EmbeddedTriton, tmp_path: Path, require: Require) -> None:
    """Two gateways behind a real nginx as documented. Each client makes a connection for each request."""
    (port,) = free_ports(1)
    with (
        sessions_gateway(triton, tmp_path / "first", PIPELINES) as first,
        sessions_gateway(triton, tmp_path / "second", PIPELINES) as second,
        running_nginx(
            tmp_path, require, port, documented_affinity(port, *(urlsplit(each.url).netloc for each in (first, second)))
        ),
    ):
        sessions = []
        for number in range(1, 33):
            limits = httpx.Limits(max_keepalive_connections=0)
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}", limits=limits)
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60)
            sessions.append(Caller(client, "text_oldest"))
        assert min(gateway.metric("open_sessions") for gateway in (first, second)) > 0
        for _ in range(3):
            for each in sessions:
                each.step(2)
        for each in sessions:
            assert each.delete() == 204
            each.client.close()
