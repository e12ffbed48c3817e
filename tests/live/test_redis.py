"""Resumable streams in Redis: two gateways, a real ``redis-server``, failures of both, and lost answers."""

import json
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.connections import dialed, post
from tests.toolkit.events import Event, checked, events_in, lines_of
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway, running_gateway, wait_until_ready
from tests.toolkit.programs import PASSWORD, RedisServer
from tests.toolkit.waiting import eventually

Pair = tuple[GatewayProcess, GatewayProcess]
CUTS = {
    "one byte before the end": (1, 0.0, 0),
    "at once after the request": (0, 0.0, 0),
    "5 ms after the request": (0, 0.005, 0),
    "in the answer's head": (0, 0.0, 20),
}
"""How many bytes are not sent, how long the client then waits, and how many bytes of the answer it reads."""
PATIENT = {"pipeline": "scripted_patient", "inputs": {"script": "{}"}}


@pytest.fixture(scope="module")
def settings(redis: RedisServer, triton: EmbeddedTriton) -> dict[str, str]:
    """Sets a short interval for pings, because each ping interrupts a read of Redis.

    Has only the scripted pipelines, because a gateway with the reference pipelines starts more slowly.
    """
    return {
        "redis_url": redis.url,
        "triton_url": triton.grpc_url,
        "config": str(LIVE / "gateway.yaml"),
        "drain_s": "0.3",
        "ping_s": "0.3",
    }


@pytest.fixture(scope="module")
def pair(settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two gateways with the same Redis and the same Triton."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        running_gateway(folder / "first", ready=False, **settings) as first,
        running_gateway(folder / "second", **settings) as second,
    ):
        wait_until_ready(first)
        yield first, second


def start(gateway: GatewayProcess, pipeline: str = "scripted_patient", **script: Any) -> str:
    """Starts a stream and returns its path."""
    body = {"pipeline": pipeline, "inputs": {"script": json.dumps(script)}}
    answer = httpx.post(f"{gateway.url}/v1/streams", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.headers["location"])


def ask(gateway: GatewayProcess, path: str, after: int | str | None = None) -> httpx.Response:
    """Returns the complete answer to GET."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    return httpx.get(gateway.url + path, headers=headers, timeout=30)


@contextmanager
def reading(gateway: GatewayProcess, path: str, after: int = 0) -> Iterator[Iterator[Event]]:
    """Yields the events of a connection as they arrive. Leaving the block early drops the connection."""
    with httpx.stream("GET", gateway.url + path, headers={"Last-Event-ID": str(after)}, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        yield events_in(lines_of(answer))


def read_all(gateway: GatewayProcess, path: str, after: int = 0) -> list[Event]:
    with reading(gateway, path, after) as events:
        return checked(list(events), after + 1)


def read_some(gateway: GatewayProcess, path: str, count: int, after: int = 0) -> list[Event]:
    """Reads ``count`` events, then drops the connection."""
    with reading(gateway, path, after) as events:
        return [next(events) for _ in range(count)]


def test_other_gateways_can_read_resume_and_delete_a_stream(pair: Pair, tmp_path: Path) -> None:
    first, second = pair
    path = start(first, outputs=12, interval_s=0.1)
    events = read_some(second, path, 3)
    events += read_some(first, path, 3, after=3)
    events += read_all(second, path, after=6)
    assert [event.id for event in events] == list(range(1, 14))
    assert read_all(first, path) == read_all(second, path) == events
    assert [ask(each, path, after=13).status_code for each in pair] == [204, 204]
    assert [each.metric("triton_calls_total", model="scripted_stream") for each in pair] == [1, 0]
    assert ask(second, path, after=99).status_code == 400

    path = start(first, outputs=12, bytes=2_000_000)
    eventually(lambda: ask(second, path).status_code == 410)
    assert read_all(second, path, after=11)[-1].data["outputs"] == 12

    notice = tmp_path / "notice"
    path = start(first, outputs=1000, interval_s=0.03, notice=str(notice))
    with reading(second, path) as stream:
        seen = [next(stream)]
        assert httpx.delete(second.url + path, timeout=30).status_code == 204
        seen += list(stream)
    assert (seen[-1].name, seen[-1].data["code"]) == ("error", "cancelled")
    eventually(notice.exists)
    assert [ask(each, path).status_code for each in pair] == [404, 404]
    assert [httpx.delete(each.url + path, timeout=30).status_code for each in pair] == [404, 404]
    assert path.rpartition("/")[2] not in first.log + second.log


@pytest.mark.parametrize("cut", CUTS)
def test_a_repeated_start_whose_answer_was_lost_runs_the_model_once(pair: Pair, cut: str, tmp_path: Path) -> None:
    """Each repeat may reach another gateway."""
    key, journal = str(uuid.uuid4()), tmp_path / "journal"
    script = json.dumps({"outputs": 5, "interval_s": 0.02, "journal": str(journal), "token": "run"})
    body = json.dumps({"pipeline": "scripted_kept", "inputs": {"script": script}}).encode()

    def repeat(gateway: GatewayProcess) -> str:
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        answer = httpx.post(f"{gateway.url}/v1/streams", content=body, headers=headers, timeout=30)
        assert answer.status_code == 201, answer.text
        return str(answer.headers["location"])

    (missing, wait_s, read_bytes), request = CUTS[cut], post("/v1/streams", body, f"Idempotency-Key: {key}")
    with dialed(pair[0]) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # the end is a reset
        connection.sendall(request[: len(request) - missing])
        time.sleep(wait_s)
        if read_bytes:
            connection.recv(read_bytes)
    path = repeat(pair[1])
    assert repeat(pair[0]) == path
    assert read_all(pair[1], path)[-1].data["outputs"] == 5
    assert repeat(pair[1]) == path
    eventually(lambda: "run answered" in journal.read_text())
    assert journal.read_text().count("run received") == 1


def test_a_lost_owner_leaves_exactly_one_terminal_event(
    pair: Pair, settings: dict[str, str], start_gateway: StartGateway
) -> None:
    """One owner is killed. The other one is stopped, and writes nothing after the terminal event when it goes on."""
    stopped, second = pair
    killed = start_gateway(**settings)
    paths = [start(owner, outputs=1000, interval_s=0.05) for owner in (killed, stopped)]
    with ExitStack() as stack:
        streams = [stack.enter_context(reading(second, path)) for path in paths]
        seen = [[next(stream)] for stream in streams]
        threads = stack.enter_context(ThreadPoolExecutor(4))
        killed.process.send_signal(signal.SIGKILL)
        stopped.process.send_signal(signal.SIGSTOP)
        stack.callback(stopped.process.send_signal, signal.SIGCONT)
        others = [[threads.submit(read_all, second, path) for _ in range(2)] for path in paths]
        for events, stream, found in zip(seen, streams, others, strict=True):
            events.extend(stream)
            assert [each.result() for each in found] == [events] * 2
        check_kept(second, paths[0], seen[0])
    eventually(lambda: stopped.metric("active_streams") == 0)
    check_kept(second, paths[1], seen[1])


def check_kept(gateway: GatewayProcess, path: str, events: list[Event]) -> None:
    """Checks that these are the stream's events, and that the last one is the error of a lost owner."""
    assert (events[-1].name, events[-1].data["code"]) == ("error", "upstream_unavailable")
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert read_all(gateway, path) == events
    assert ask(gateway, path, after=events[-1].id).status_code == 204


def test_streams_survive_a_restart_of_redis(pair: Pair, redis: RedisServer) -> None:
    """The outage is longer than ``resume_s`` of the pipeline, which is 2 s. The second reader reconnects after it."""
    first, second = pair
    path, other = start(first, outputs=40, interval_s=0.1), start(first, outputs=60, interval_s=0.1)
    with reading(second, path) as stream:
        seen, seen_of_other = [next(stream)], read_some(second, other, 3)
        redis.stop()
        for each in pair:
            answer = httpx.post(f"{each.url}/v1/streams", json=PATIENT)
            assert (answer.status_code, answer.json()["code"]) == (503, "upstream_unavailable")
            assert "retry-after" in answer.headers
            assert httpx.get(f"{each.url}/health/ready").status_code == 200
        assert ask(second, path).status_code == 503
        time.sleep(2.5)
        redis.start()
        time.sleep(0.8)  # the owner of the streams sends at least one heartbeat before the reader reconnects
        seen += list(stream)
        seen_of_other += read_all(second, other, after=3)
    assert [seen[-1].data["reason"], seen_of_other[-1].data["reason"]] == ["complete", "complete"]
    assert [event.id for event in seen] == list(range(1, 42))
    assert read_all(first, path) == seen
    assert all(f"Redis at 127.0.0.1:{redis.port} does not answer" in each.log for each in pair)
    assert all(PASSWORD not in each.log for each in pair)


def test_a_frozen_redis_takes_no_slot_from_other_requests(pair: Pair, redis: RedisServer) -> None:
    """24 streams wait for Redis for at most two seconds each. After some missed heartbeats all are rejected at once."""
    first, _ = pair
    inputs = {"script": json.dumps({"outputs": 1})}
    body = {"pipeline": "scripted_patient", "inputs": inputs}
    with ThreadPoolExecutor(24) as threads, httpx.Client(base_url=first.url, timeout=30) as client:
        redis.freeze()
        try:
            starts = [threads.submit(httpx.post, f"{first.url}/v1/streams", json=body, timeout=30) for _ in range(24)]
            eventually(lambda: first.metric("requests_waiting") == 0)
            plain = [client.post("/v1/pipelines/scripted_patient", json=inputs).status_code for _ in range(24)]
            refused = [each.result() for each in starts]
            eventually(lambda: client.post("/v1/streams", json=body).elapsed.total_seconds() < 1.0)
            later = client.post("/v1/streams", json=body)
        finally:
            redis.thaw()
        assert plain == [200] * 24
        assert {answer.status_code for answer in [*refused, later]} == {503}
        eventually(lambda: client.post("/v1/streams", json=body).status_code == 201)


def test_a_gateway_starts_without_redis_connects_later_and_ends_its_readers_when_it_drains(
    settings: dict[str, str], pair: Pair, redis: RedisServer, start_gateway: StartGateway
) -> None:
    """It serves everything but resumable streams until Redis answers, and logs it once."""
    _, second = pair
    redis.stop()
    try:
        gateway = start_gateway(**settings)
        for _ in range(3):
            answer = httpx.post(f"{gateway.url}/v1/streams", json=PATIENT)
            assert (answer.status_code, answer.json()["code"]) == (503, "upstream_unavailable")
            assert "retry-after" in answer.headers
        plain = httpx.post(f"{gateway.url}/v1/pipelines/scripted_patient/stream", json=PATIENT["inputs"])
        assert "event: done" in plain.text
        eventually(lambda: gateway.log.count("does not answer; until it does") == 1)
    finally:
        redis.start()
    eventually(lambda: gateway.log.count(f"Redis at 127.0.0.1:{redis.port} answers again") == 1)
    path = start(gateway, outputs=1000, interval_s=0.05)
    with reading(second, path) as stream:
        seen = [next(stream)]
        gateway.process.send_signal(signal.SIGTERM)
        seen += list(stream)
    assert (seen[-1].name, seen[-1].data["code"]) == ("error", "draining")
    assert gateway.process.wait(15) == 0
    assert gateway.log.count("does not answer; until it does") == 1
