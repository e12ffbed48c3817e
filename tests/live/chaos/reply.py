"""The part of an answer that a client received, and its possible outcomes."""

import json
from dataclasses import dataclass

from app.core.errors import GatewayError, Outcome
from tests.toolkit.engine import every_error
from tests.toolkit.events import Event, checked, events_in
from tests.toolkit.websocket_client import TEXT, frames_in

OUTCOME_BY_CODE = {error.code: error.outcome for error in every_error(GatewayError)}
OUTCOMES_BY_STATUS = {
    400: {Outcome.CLIENT_ERROR, Outcome.EARLY_EXIT, Outcome.MODEL_ERROR},
    404: {Outcome.CLIENT_ERROR},
    422: {Outcome.CLIENT_ERROR},
    429: {Outcome.REJECTED},
    500: {Outcome.MODEL_ERROR},
    502: {Outcome.MODEL_ERROR, Outcome.CONTRACT_VIOLATION},
    503: {Outcome.UNAVAILABLE, Outcome.REJECTED},
    504: {Outcome.TIMEOUT},
}
"""For dialects whose errors have no code. A 500 of /v2 is an error of the model."""
FAILURES = frozenset(Outcome) - {Outcome.OK, Outcome.INTERNAL}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @classmethod
    def of(cls, received: bytes) -> "Reply | None":
        """Returns None if the head is not complete."""
        head, separator, rest = received.partition(b"\r\n\r\n")
        if not separator:
            return None
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("upgrade") == "websocket" and head.startswith(b"HTTP/1.1 101 "):
            events = events_of_messages(rest)
            body, is_whole = rest, bool(events) and events[-1].name != "output"
        elif headers.get("transfer-encoding") == "chunked":
            body, is_whole = dechunked(rest)
        else:
            body, is_whole = rest, len(rest) == int(headers.get("content-length", 0))
        return cls(int(status.split()[1]), headers, body, is_whole)

    @property
    def text(self) -> str:
        return self.body.decode()


def dechunked(body: bytes) -> tuple[bytes, bool]:
    """Returns the content so far, and whether the last chunk was received."""
    content = b""
    while b"\r\n" in body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return content, body == b"\r\n"
        content, body = content + body[:length], body[length + 2 :]
    return content, False


def events_of_messages(frames: bytes) -> list[Event]:
    """The events in the complete text messages of a gateway, numbered from 1."""
    messages = [json.loads(data) for opcode, data in frames_in(frames) if opcode == TEXT]
    return [Event(number, each["event"], each["data"]) for number, each in enumerate(messages, 1)]


def of_messages(reply: Reply) -> set[str]:
    """For the answer to the only message of a WebSocket."""
    return of_end(checked(events_of_messages(reply.body))[-1]) if reply.status == 101 else _of_error(reply)


def of_pipeline(reply: Reply) -> set[str]:
    if reply.status != 200:
        return _of_error(reply)
    return {Outcome.EARLY_EXIT if "x-early-exit" in reply.headers else Outcome.OK}


def of_start(reply: Reply) -> set[str]:
    """For ``POST /v1/streams``. Empty if the stream was started, because its terminal event has the outcome."""
    return set() if reply.status == 201 else _of_error(reply)


def of_events(reply: Reply) -> set[str]:
    """Checks that there is exactly one terminal event, and nothing after it."""
    if reply.status != 200:
        return _of_error(reply)
    return of_end(checked(list(events_in(reply.text.split("\n"))))[-1])


def of_end(end: Event) -> set[str]:
    """The outcomes of a terminal event."""
    if end.name == "error":
        return {OUTCOME_BY_CODE[end.data["code"]]}
    return {Outcome.EARLY_EXIT if end.data["early_exit"] else Outcome.OK}


def of_oip(reply: Reply) -> set[str]:
    return {Outcome.OK} if reply.status == 200 else _of_error(reply)


def of_generate_stream(reply: Reply) -> set[str]:
    """There is no terminal event: an error is the last object, or the status."""
    if reply.status != 200:
        return _of_error(reply)
    return set(FAILURES) if "error" in _last_data(reply) else {Outcome.OK}


def of_openai(reply: Reply) -> set[str]:
    if reply.status != 200:
        return _of_error(reply)
    ends = [line for line in reply.text.split("\n") if line == "data: [DONE]" or line.startswith('data: {"error"')]
    assert len(ends) == 1, reply.text[-500:]
    if ends == ["data: [DONE]"]:
        return {Outcome.OK, Outcome.EARLY_EXIT}
    return {OUTCOME_BY_CODE[_last_data(reply)["error"]["code"]]}


def _last_data(reply: Reply) -> dict[str, dict[str, str]]:
    lines = [line for line in reply.text.split("\n") if line.startswith("data: ")]
    last: dict[str, dict[str, str]] = json.loads(lines[-1].removeprefix("data: ")) if lines else {}
    return last


def _of_error(reply: Reply) -> set[str]:
    """Reads a problem object, or the error of OpenAI or of the Open Inference Protocol, which has no code."""
    body = json.loads(reply.text.removeprefix("data: "))
    error = body.get("error", body)
    return {OUTCOME_BY_CODE[error["code"]]} if isinstance(error, dict) else OUTCOMES_BY_STATUS[reply.status]
