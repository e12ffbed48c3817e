"""Requests of every dialect whose end is known beforehand, in an order that a seed decides."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from app.domain.errors import Outcome
from tests.live.chaos import reply
from tests.live.chaos.client import STAYS, Ask, Manner

Script = dict[str, Any]
_EXIT = {"error": {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[nothing]"}}
_UNARY: list[tuple[str, Script]] = [
    (Outcome.OK, {}),
    (Outcome.OK, {"sleep_s": 0.02, "text": "x" * 3000}),
    (Outcome.EARLY_EXIT, _EXIT),
    (Outcome.EARLY_EXIT, {"omit": ["TEXT"]}),
    (Outcome.MODEL_ERROR, {"error": {"code": "INTERNAL", "message": "scripted"}}),
    (Outcome.MODEL_ERROR, {"raise": "scripted"}),
]
_STREAMED: list[tuple[str, Script]] = [
    (Outcome.OK, {"outputs": 3}),
    (Outcome.OK, {"outputs": 0}),
    (Outcome.OK, {"outputs": 12, "bytes": 2000, "interval_s": 0.01}),
    (Outcome.OK, {"outputs": 3, "then": "final_with_last"}),
    (Outcome.EARLY_EXIT, {"outputs": 1, "then": "error", **_EXIT}),
    (Outcome.MODEL_ERROR, {"outputs": 2, "then": "error"}),
    (Outcome.MODEL_ERROR, {"outputs": 0, "then": "error"}),
    (Outcome.CONTRACT_VIOLATION, {"outputs": 3, "items": [1, 9]}),
]
_PLAIN = {Outcome.OK, Outcome.MODEL_ERROR}
"""Outcomes where no rule of a pipeline applies."""
_INVALID = 0.08
_LEAVES = 0.25


class Traffic:
    """``journal``: the file in which the models note the requests that they receive."""

    def __init__(self, seed: int, journal: Path) -> None:
        self._random = random.Random(seed)
        self._journal = str(journal)
        self._prefix = f"chaos-{seed}"
        self._count = 0

    def asks(self, count: int) -> Iterator[tuple[Ask, Manner]]:
        for _ in range(count):
            yield self.ask()

    def ask(self) -> tuple[Ask, Manner]:
        make = self._random.choice([self._unary, self._raw, self._infer, self._stream, self._generate, self._openai])
        ask = make(self._token())
        return ask, self._manner(ask)

    def calm(self, count: int) -> Iterator[tuple[Ask, Manner]]:
        """Of clients that stay."""
        for ask, _ in self.asks(count):
            yield ask, STAYS

    def smallest(self) -> Ask:
        return self._posted(self._token(), "unary", Outcome.OK, {})

    def slow(self, count: int) -> Iterator[tuple[Ask, Manner]]:
        """Requests that keep a slot of their model for a while."""
        for _ in range(count):
            ask = self._posted(self._token(), "unary", Outcome.OK, {"sleep_s": 0.05})
            yield ask, STAYS

    def endless(self) -> Ask:
        """A stream that is larger than every buffer on its way."""
        return self._posted(self._token(), "stalled", Outcome.CANCELLED, {"outputs": 400, "bytes": 64_000})

    def _token(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def _unary(self, token: str) -> Ask:
        outcome, script = self._random.choice(_UNARY)
        return self._maybe_invalid(self._posted(token, "unary", outcome, script))

    def _raw(self, token: str) -> Ask:
        outcome, script = self._random.choice(_UNARY)
        content = self._text(token, script).encode()
        raw = _request("/v1/pipelines/raw", token, content, "application/octet-stream")
        return Ask(token, "raw", raw, reply.of_pipeline, outcome)

    def _infer(self, token: str) -> Ask:
        outcome, script = self._random.choice([each for each in _UNARY if each[0] in _PLAIN and "omit" not in each[1]])
        tensor = {"name": "SCRIPT", "datatype": "BYTES", "shape": [1], "data": [self._text(token, script)]}
        content = json.dumps({"inputs": [tensor]}).encode()
        raw = _request("/v2/models/scripted/infer", token, content)
        return Ask(token, "infer", raw, reply.of_oip, outcome)

    def _stream(self, token: str) -> Ask:
        outcome, script = self._random.choice(_STREAMED)
        return self._maybe_invalid(self._posted(token, "stream", outcome, script))

    def _generate(self, token: str) -> Ask:
        outcome, script = self._random.choice([each for each in _STREAMED if each[0] in _PLAIN])
        content = json.dumps({"SCRIPT": self._text(token, script)}).encode()
        raw = _request("/v2/models/scripted_stream/generate_stream", token, content)
        return Ask(token, "generate_stream", raw, reply.of_generate_stream, outcome)

    def _openai(self, token: str) -> Ask:
        outcome, script = self._random.choice(_STREAMED)
        content = json.dumps({"model": "stream", "prompt": self._text(token, script), "stream": True}).encode()
        return Ask(token, "openai", _request("/v1/completions", token, content), reply.of_openai, outcome)

    def _posted(self, token: str, dialect: str, outcome: str, script: Script) -> Ask:
        content = json.dumps({"script": self._text(token, script)}).encode()
        path = "/v1/pipelines/unary" if dialect == "unary" else "/v1/pipelines/stream/stream"
        outcomes_of: Callable[[reply.Reply], set[str]] = reply.of_pipeline if dialect == "unary" else reply.of_events
        return Ask(token, dialect, _request(path, token, content), outcomes_of, outcome)

    def _maybe_invalid(self, ask: Ask) -> Ask:
        if self._random.random() > _INVALID:
            return ask
        raw = ask.content.replace(b'{"script"', b'{"scrypt"')
        return Ask(ask.token, ask.dialect, raw, ask.outcomes_of, Outcome.CLIENT_ERROR)

    def _text(self, token: str, script: Script) -> str:
        return json.dumps({**script, "journal": self._journal, "token": token})

    def _manner(self, ask: Ask) -> Manner:
        pieces = self._random.choice([1, 1, 1, 4])
        if self._random.random() > _LEAVES:
            return Manner(pieces=pieces)
        leaves: list[Manner] = [
            Manner(pieces=pieces, leaves_after_sent=self._random.randrange(len(ask.content))),
            Manner(pieces=pieces, leaves_after_s=self._random.random() * 0.05),
            Manner(pieces=pieces, leaves_after_received=self._random.randrange(1, 1000)),
        ]
        return self._random.choice(leaves)


def _request(path: str, token: str, content: bytes, media_type: str = "application/json") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: gateway\r\nX-Request-ID: {token}\r\nContent-Type: {media_type}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
