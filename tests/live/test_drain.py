"""Drain: each request that is admitted before the signal gets an answer or a terminal event."""

import json
import signal
import socket

import httpx

from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway
from tests.toolkit.raw_http import dialed, post, rest
from tests.toolkit.waiting import eventually

LONG = json.dumps({"script": json.dumps({"outputs": 1000, "interval_s": 0.2})}).encode()
SHORT = json.dumps({"script": json.dumps({"outputs": 2})}).encode()
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The gateway sends it before it reads the body, and admits the request before that."""
CONFIG = str(LIVE / "gateway.yaml")
"""Only the scripted pipelines, because a gateway with the reference pipelines starts more slowly."""


class Upload:
    """A POST over its own socket, which the gateway has admitted when the constructor returns.

    The constructor sends the first half of the body, ``finish`` the second half.
    """

    def __init__(self, gateway: GatewayProcess, path: str, body: bytes) -> None:
        self._socket = dialed(gateway)
        self._rest = body[len(body) // 2 :]
        self._socket.sendall(post(path, b"", "Expect: 100-continue", size=len(body)))
        assert self._socket.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        self._socket.sendall(body[: len(body) // 2])

    def finish(self) -> None:
        self._socket.sendall(self._rest)

    def answer(self) -> str:
        return rest(self._socket).decode()


def is_draining(gateway: GatewayProcess) -> bool:
    return httpx.get(f"{gateway.url}/health/ready").json()["status"] == "draining"


def send_sigterm(gateway: GatewayProcess) -> None:
    gateway.process.send_signal(signal.SIGTERM)
    eventually(lambda: is_draining(gateway))


def test_every_upload_and_stream_gets_its_answer(start_gateway: StartGateway) -> None:
    draining = start_gateway(config=CONFIG, drain_s="4")
    running = [Upload(draining, "/v1/pipelines/scripted_patient/stream", LONG) for _ in range(6)]
    for each in running:
        each.finish()
    completed = [Upload(draining, "/v1/pipelines/scripted_stream/stream", SHORT) for _ in range(6)]
    resumable = json.dumps({"pipeline": "scripted_stream", "inputs": json.loads(SHORT)}).encode()
    unfinished = [Upload(draining, "/v1/pipelines/scripted", SHORT) for _ in range(4)]
    unfinished += [Upload(draining, "/v1/pipelines/scripted_patient/stream", LONG) for _ in range(4)]
    unfinished += [Upload(draining, "/v1/streams", resumable) for _ in range(4)]
    eventually(lambda: draining.metric("active_streams") == 6)
    send_sigterm(draining)
    for each in completed:
        each.finish()
    for path in ("/v1/pipelines/scripted", "/v1/pipelines/scripted_stream/stream", "/v1/streams"):
        refused = httpx.post(f"{draining.url}{path}", json=json.loads(SHORT))
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
    for each in running:
        text = each.answer()
        assert text.startswith("HTTP/1.1 200")
        assert text.count("event: error") == 1
        assert '"code":"draining"' in text
    for each in completed:
        text = each.answer()
        assert text.startswith("HTTP/1.1 200")
        assert text.count("event: done") == 1
    for each in unfinished:
        text = each.answer()
        assert text.startswith("HTTP/1.1 503")
        assert '"code":"draining"' in text
    assert draining.process.wait(20) == 0
