"""Resumable streams in one gateway process, which keeps the events in memory."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.live.conftest import GatewayProcess, StartGateway
from tests.live.resumable import ask, delete, read_all, read_some, reading, start, status
from tests.toolkit.processes import LIVE
from tests.toolkit.waiting import eventually


def counted(gateway: GatewayProcess, **labels: str) -> float:
    return gateway.metric("requests_total", pipeline="scripted_patient", **labels)


def calls(gateway: GatewayProcess) -> float:
    return gateway.metric("triton_calls_total", model="scripted_stream")


def test_starting_a_stream_returns_its_location(gateway: GatewayProcess) -> None:
    body = {"pipeline": "scripted_patient", "inputs": {"script": "{}"}}
    answer = httpx.post(f"{gateway.url}/v1/streams", json=body)
    assert answer.status_code == 201
    assert re.fullmatch(r"/v1/streams/[A-Za-z0-9_-]{22}", answer.headers["location"])
    assert answer.json()["url"] == answer.headers["location"] == f"/v1/streams/{answer.json()['id']}"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    events = read_all(gateway, answer.headers["location"])
    assert events[-1].data["request_id"] == answer.headers["x-request-id"]


def test_resuming_gives_no_gaps_or_duplicates(gateway: GatewayProcess) -> None:
    path = start(gateway, outputs=12, interval_s=0.03)
    events = read_some(gateway, path, 3)
    events += read_some(gateway, path, 4, after=3)
    events += read_all(gateway, path, after=7)
    assert [event.id for event in events] == list(range(1, 14))
    assert events[-1].data["outputs"] == 12


def test_a_reconnect_does_not_start_a_second_inference(gateway: GatewayProcess) -> None:
    before = calls(gateway)
    path = start(gateway, outputs=6, interval_s=0.03)
    for after in range(3):
        read_some(gateway, path, 1, after)
    assert read_all(gateway, path)[-1].data["outputs"] == 6
    eventually(lambda: calls(gateway) == before + 1)
    read_all(gateway, path)
    assert calls(gateway) == before + 1


def test_a_stream_sets_retry_and_disables_buffering(gateway: GatewayProcess) -> None:
    answer = ask(gateway, start(gateway))
    assert answer.text.startswith("retry: 1000\n\n")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-store, no-transform"
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_two_concurrent_readers_get_the_same_events(gateway: GatewayProcess) -> None:
    path = start(gateway, outputs=8, interval_s=0.03)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: read_all(gateway, path), range(2))
    assert first == second


def test_a_finished_stream_replays_and_its_terminal_id_gets_204(gateway: GatewayProcess) -> None:
    path = start(gateway, outputs=2)
    events = read_all(gateway, path)
    assert read_all(gateway, path) == events
    assert read_all(gateway, path, after=1) == events[1:]
    answer = ask(gateway, path, after=3)
    assert (answer.status_code, answer.content) == (204, b"")


def test_resuming_before_dropped_events_is_410(gateway: GatewayProcess) -> None:
    path = start(gateway, outputs=12, bytes=2_000_000)
    eventually(lambda: ask(gateway, path).status_code == 410)
    answer = ask(gateway, path, after=1)
    assert (answer.status_code, answer.json()["code"]) == (410, "stream_evicted")
    assert read_all(gateway, path, after=11)[-1].data["outputs"] == 12


def test_an_unknown_id_is_404(gateway: GatewayProcess) -> None:
    path = "/v1/streams/AAAAAAAAAAAAAAAAAAAAAA"
    answer = ask(gateway, path)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_stream")
    assert delete(gateway, path) == 404


def test_a_last_event_id_that_was_never_sent_is_400(gateway: GatewayProcess) -> None:
    path = start(gateway, outputs=1)
    read_all(gateway, path)
    for text in ("-1", "1.5", "x", "9" * 400, "1 2", "0x1", "+1", "99", "1,2"):
        answer = ask(gateway, path, after=text)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request"), text
        assert text not in answer.json()["detail"]


def test_digits_that_are_not_ascii_are_400(gateway: GatewayProcess) -> None:
    path = start(gateway, outputs=1)
    answer = httpx.get(gateway.url + path, headers={"Last-Event-ID": "²".encode("latin-1")})
    assert answer.status_code == 400


def test_delete_cancels_the_model_and_removes_the_stream(gateway: GatewayProcess, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    path = start(gateway, outputs=1000, interval_s=0.03, notice=str(notice))
    with reading(gateway, path) as events:
        seen = [next(events)]
        assert delete(gateway, path) == 204
        seen += list(events)
    assert (seen[-1].name, seen[-1].data["code"]) == ("error", "cancelled")
    assert seen[-1].data["detail"] == "The stream was cancelled with DELETE."
    eventually(lambda: notice.exists() and bool(notice.read_text()))
    assert status(gateway, path) == 404
    assert delete(gateway, path) == 404


def test_only_a_stream_without_readers_is_cancelled_and_expires(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Both streams last longer than ``resume_s``."""
    notice = tmp_path / "notice"
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(read_all, gateway, start(gateway, outputs=6, interval_s=0.5))
        started = time.monotonic()
        path = start(gateway, outputs=1000, interval_s=0.05, notice=str(notice))
        eventually(lambda: notice.exists() and bool(notice.read_text()))
        assert float(notice.read_text().split()[0]) - started >= 1.9
        events = read_all(gateway, path)
        assert (events[-1].name, events[-1].data["code"]) == ("error", "cancelled")
        time.sleep(2.2)
        assert status(gateway, path) == 404
        assert read.result()[-1].data["reason"] == "complete"


def test_the_deadline_ends_a_stream(gateway: GatewayProcess) -> None:
    answer = httpx.post(
        f"{gateway.url}/v1/streams",
        json={"pipeline": "scripted_kept", "inputs": {"script": json.dumps({"outputs": 100, "interval_s": 0.1})}},
        headers={"X-Request-Timeout": "0.5"},
    )
    last = read_all(gateway, answer.headers["location"])[-1]
    assert (last.name, last.data["code"]) == ("error", "deadline_exceeded")


def test_drain_ends_a_stream_with_draining(start_gateway: StartGateway) -> None:
    gateway = start_gateway(config=str(LIVE / "gateway.yaml"), drain_s="0.3")
    path = start(gateway, outputs=1000, interval_s=0.05)
    with reading(gateway, path) as events:
        seen = [next(events)]
        gateway.process.send_signal(signal.SIGTERM)
        seen += list(events)
    assert (seen[-1].name, seen[-1].data["code"]) == ("error", "draining")
    assert gateway.process.wait(10) == 0


INVALID_STARTS = [
    (b"{", "application/json", 400, "invalid_json"),
    (b"\xff", "application/json", 400, "invalid_json"),
    (b'{"pipeline": "x", "inputs": ' + b"[" * 100_000, "application/json", 400, "invalid_json"),
    (b"[]", "application/json", 422, "invalid_input"),
    (b'{"pipeline": "scripted_patient"}', "application/json", 422, "invalid_input"),
    (b'{"pipeline": "nothing", "inputs": {}}', "application/json", 404, "unknown_pipeline"),
    (b'{"pipeline": "scripted_patient", "inputs": {}}', "application/json", 422, "invalid_input"),
    (b'{"pipeline": "scripted_patient", "inputs": {"script": 1}}', "application/json", 422, "invalid_input"),
    (b'{"pipeline": "scripted_patient", "inputs": [1]}', "application/json", 400, "invalid_request"),
    (b"{}", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
]


def test_an_invalid_start_is_rejected_without_a_call(gateway: GatewayProcess) -> None:
    before = calls(gateway)
    for content, kind, status_code, code in INVALID_STARTS:
        answer = httpx.post(f"{gateway.url}/v1/streams", content=content, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["code"]) == (status_code, code), content[:80]
        assert "location" not in answer.headers, content[:80]
    assert calls(gateway) == before


def test_a_stream_is_counted_once_when_it_ends(gateway: GatewayProcess) -> None:
    before = counted(gateway)
    path = start(gateway, outputs=4, interval_s=0.4)
    read_some(gateway, path, 1)
    assert counted(gateway) == before
    assert gateway.metric("active_streams", pipeline="scripted_patient") >= 1
    read_all(gateway, path)
    eventually(lambda: counted(gateway, transport="stream", outcome="ok") > 0)
    read_all(gateway, path)
    ask(gateway, path, after=5)
    assert counted(gateway) == before + 1


def test_the_log_has_the_request_id_but_not_the_stream_id(gateway: GatewayProcess) -> None:
    answer = httpx.post(
        f"{gateway.url}/v1/streams",
        json={"pipeline": "scripted_patient", "inputs": {"script": "{}"}},
        headers={"X-Request-ID": "resumable-1"},
    )
    path, stream_id = answer.headers["location"], answer.json()["id"]
    read_all(gateway, path)
    ask(gateway, path, after="x")
    delete(gateway, path)
    ask(gateway, path)
    eventually(lambda: bool(ended(gateway)))
    (line,) = ended(gateway)
    assert (line["pipeline"], line["transport"], line["outcome"]) == ("scripted_patient", "stream", "ok")
    assert stream_id not in gateway.log
    assert stream_id not in ask(gateway, path).text


def ended(gateway: GatewayProcess) -> list[dict[str, Any]]:
    return [line for line in gateway.log_lines("resumable-1") if line.get("transport") == "stream"]
