"""Steps of stateful models as streams and over WebSockets: the sums prove that each step ran to its end."""

import asyncio
import json
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.sessions import (
    MODELS,
    STREAMED,
    OpenedSession,
    body_of,
    code,
    kill_triton,
    session_client,
    sessions_triton,
    step,
    wait_for_new_triton,
)
from tests.toolkit.events import checked, events_in
from tests.toolkit.processes import GatewayProcess, live_gateway
from tests.toolkit.waiting import eventually
from tests.toolkit.websocket_client import event_of, events_of, opened

SAMPLE = {"NUMBER": 1, "COUNT": 1}
UNARY = ("text_direct", "uint64_oldest", "int32_oldest", "short")
PIPELINES: dict[str, Any] = {
    **{name: {"model": name, "session": True, "stream": True, "sample": SAMPLE} for name in STREAMED},
    **{name: {"model": name, "session": True} for name in UNARY},
    "whole": {"model": "streamed_oldest", "session": True, "sample": SAMPLE},
    "few": {"model": "uint64_direct", "session": {"max_open": 2}},
}


triton = sessions_triton((*STREAMED, *UNARY, "uint64_direct"))
gateway = live_gateway(PIPELINES, ping_s="0.2")


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with session_client(gateway) as client:
        yield client


class Caller(OpenedSession):
    def step(self, number: int, count: int, **headers: str) -> None:
        """One step, whose outputs must have this session's sums."""
        answer = self.send(number, count, **headers)
        assert answer.status_code == 200, answer.text
        events = checked(list(events_in(answer.text.splitlines())))
        self.steps += 1
        assert answer.headers["X-Session-Step"] == str(self.steps)
        sums = [self.sum + number * each for each in range(1, count + 1)]
        self.sum += number * count
        assert [(each.data["SUM"], each.data["STEPS"]) for each in events[:-1]] == [(one, self.steps) for one in sums]
        assert (events[-1].name, events[-1].data["outputs"]) == ("done", count)

    def leave(self, number: int, count: int, sleep_s: float) -> None:
        """Leaves after the first output. The model adds all numbers of the step."""
        with self.client.stream("POST", f"{self.url}/stream", json=body_of(number, count, sleep_s)) as answer:
            assert next(events_in(answer.iter_lines())).data["SUM"] == self.sum + number
        self.steps, self.sum = self.steps + 1, self.sum + number * count

    def end(self) -> None:
        self.step(1, 1, X_Session_End="true")


@pytest.mark.parametrize("pipeline", STREAMED)
def test_the_outputs_of_each_step_are_events(client: httpx.Client, pipeline: str) -> None:
    sessions = [Caller(client, pipeline) for _ in range(min(STREAMED[pipeline].places, 8))]
    for number, count in ((1, 3), (10, 1), (100, 0), (1000, 40)):
        for session in sessions:
            session.step(number, count)
    for session in sessions:
        session.end()
        assert code(session.send(1, 1)) == (404, "unknown_session")


def test_a_step_runs_to_its_end_when_its_caller_leaves(client: httpx.Client, gateway: GatewayProcess) -> None:
    """The next step waits for its turn, and its sums have all numbers of the step before it."""
    session = Caller(client, "streamed_oldest")
    session.step(1, 2)
    for _ in range(3):
        session.leave(5, 8, 0.05)
        session.step(7, 2)
    session.leave(5, 20, 0.05)
    session.end()
    left = [line for line in gateway.json_lines() if line.get("outcome") == "cancelled"]
    assert {(line["path"], line["transport"], line["pipeline"]) for line in left[-4:]} == {
        ("/v1/sessions/***/stream", "stream", "streamed_oldest")
    }


def test_a_step_runs_to_its_end_when_its_caller_leaves_before_its_first_output(client: httpx.Client) -> None:
    """Its outputs are more than the gateway keeps for a reader."""
    session, other = Caller(client, "streamed_oldest"), Caller(client, "streamed_oldest")
    session.step(1, 2)
    with client.stream("POST", f"{other.url}/stream", json=body_of(1, 2, 1.5)) as answer:
        assert next(events_in(answer.iter_lines())).name == "output"
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{session.url}/stream", json=body_of(5, 4000), timeout=0.3)
    session.steps, session.sum = 2, session.sum + 5 * 4000
    session.step(7, 2)
    session.end()


def test_a_failed_step_is_a_step(client: httpx.Client) -> None:
    """After the first output the error is an event, before it a status."""
    session = Caller(client, "streamed_oldest")
    outputs = checked(list(events_in(session.send(-1, 3).text.splitlines())))
    assert [each.name for each in outputs] == ["output", "output", "error"]
    assert outputs[-1].data["code"] == "model_error"
    assert code(session.send(-1, 1, X_Session_Step="2")) == (502, "model_error")
    assert code(session.send(-1, 1, X_Session_Step="2")) == (409, "step_out_of_turn")
    session.steps, session.sum = 2, -4
    session.step(6, 2)
    session.end()


def test_requests_that_do_not_fit_are_no_step(client: httpx.Client) -> None:
    session, whole = Caller(client, "streamed_oldest"), Caller(client, "whole")
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
    session.step(1, 2)
    session.end()
    assert client.delete(whole.url).status_code == 204


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
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)


async def test_without_a_free_place_the_handshake_is_refused(gateway: GatewayProcess) -> None:
    """The place of a session without a step is free at once."""
    clients = [await opened(gateway, "few") for _ in range(2)]
    with pytest.raises(InvalidStatus) as refused:
        await opened(gateway, "few")
    assert refused.value.response.status_code == 429
    await asyncio.gather(*[client.close() for client in clients])
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)
    async with opened(gateway, "few") as client:
        assert (await step(client, 1, 1))["SUM"] == 1


async def test_a_session_that_expires_ends_its_idle_websocket(gateway: GatewayProcess) -> None:
    async with opened(gateway, "short") as client:
        await step(client, 1, 1)
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert gateway.metric("open_sessions", pipeline="short") == 0
        assert (client.close_code, client.close_reason) == (4404, "unknown_session")


async def test_a_step_goes_on_when_its_client_leaves(gateway: GatewayProcess) -> None:
    before = gateway.metric("sessions_total", pipeline="int32_oldest", reason="lost")
    client = await opened(gateway, "int32_oldest")
    await client.send(json.dumps({"NUMBER": 1, "SLEEP": 0.5}))
    await asyncio.to_thread(eventually, lambda: gateway.metric("requests_running") == 1)
    client.transport.abort()
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)
    await asyncio.to_thread(eventually, lambda: gateway.metric("requests_running") == 0)
    assert gateway.metric("sessions_total", pipeline="int32_oldest", reason="lost") == before


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
    Caller(client, "streamed_oldest").end()
