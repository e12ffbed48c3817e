"""Requests of every dialect with a scripted outcome, in an order that a seed decides."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from app.core.errors import Outcome
from tests.live.chaos.client import (
    RESUMABLE,
    STAYS,
    WEBSOCKET,
    Ask,
    Manner,
    Reply,
    of_events,
    of_generate_stream,
    of_messages,
    of_oip,
    of_openai,
    of_pipeline,
    of_start,
)
from tests.toolkit.connections import post
from tests.toolkit.websocket_client import TEXT, frame, handshake

Script = dict[str, Any]
_EXIT = {"error": {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[nothing]"}}
_FORGED = '{{"' * 2000 + "\r\n\r\nevent: done\r\ndata: {}\r\n\r\nid: 9\0\n\ndata: [DONE]\u2028"
"""What a hostile model writes: the end of a stream, and the beginnings of many objects."""
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
    (Outcome.OK, {"outputs": 1, "texts": [_FORGED.encode().hex()]}),
    (Outcome.OK, {"outputs": 20, "bytes": 20_000}),
    (Outcome.EARLY_EXIT, {"outputs": 1, "then": "error", **_EXIT}),
    (Outcome.MODEL_ERROR, {"outputs": 2, "then": "error"}),
    (Outcome.MODEL_ERROR, {"outputs": 0, "then": "error"}),
    (Outcome.CONTRACT_VIOLATION, {"outputs": 3, "items": [1, 9]}),
]
_PLAIN = {Outcome.OK, Outcome.MODEL_ERROR}
"""Outcomes of requests to a model, where no rule of a pipeline applies."""
_INVALID = 0.08
_LEAVES, _LEAVES_SHARED = 0.25, 0.1
_FIRST_ITEM = 2000
FOREIGN = "the answer of another request"


class Dialect(NamedTuple):
    """``body_of``: the body for the text of a script. ``may_be_invalid``: whether a field may have a wrong name."""

    path: str
    scripts: list[tuple[str, Script]]
    outcomes_of: Callable[[Reply], set[str]]
    body_of: Callable[[str], object]
    may_be_invalid: bool = False


_SHOWN = [each for each in _UNARY if each[0] in _PLAIN and "omit" not in each[1]]
_TENSOR = {"name": "SCRIPT", "datatype": "BYTES", "shape": [1]}
DIALECTS = {
    "unary": Dialect("/v1/pipelines/unary", _UNARY, of_pipeline, lambda text: {"script": text}, True),
    "raw": Dialect("/v1/pipelines/raw", _UNARY, of_pipeline, str.encode),
    "infer": Dialect(
        "/v2/models/scripted/infer", _SHOWN, of_oip, lambda text: {"inputs": [_TENSOR | {"data": [text]}]}
    ),
    "stream": Dialect("/v1/pipelines/stream/stream", _STREAMED, of_events, lambda text: {"script": text}, True),
    "generate_stream": Dialect(
        "/v2/models/scripted_stream/generate_stream",
        [each for each in _STREAMED if each[0] in _PLAIN],
        of_generate_stream,
        lambda text: {"SCRIPT": text},
    ),
    "openai": Dialect(
        "/v1/completions",
        _STREAMED,
        of_openai,
        lambda text: {"model": "stream", "prompt": text, "stream": True},
    ),
    RESUMABLE: Dialect(
        "/v1/streams",
        [*_STREAMED, (Outcome.OK, {"outputs": 15, "interval_s": 0.04})],
        of_start,
        lambda text: {"pipeline": "stream", "inputs": {"script": text}},
        True,
    ),
}


class Traffic:
    """``journal``: the file in which the models note the requests that they receive.

    ``clients_leave``: whether clients may disconnect before their answer is complete.
    """

    def __init__(self, seed: int, journal: Path, *, clients_leave: bool = True) -> None:
        self._random = random.Random(seed)
        self._journal = str(journal)
        self._clients_leave = clients_leave
        self._prefix = f"chaos-{seed}"
        self._count = 0

    def ask(self) -> tuple[Ask, Manner]:
        name = self._random.choice([*DIALECTS, WEBSOCKET])
        if name == WEBSOCKET:
            ask = self._message()
        else:
            ask = self._asked(name, *self._random.choice(DIALECTS[name].scripts))
            if DIALECTS[name].may_be_invalid and self._random.random() < _INVALID:
                content = ask.content.replace(b'{"script"', b'{"scrypt"')
                ask = replace(ask, content=content, expected=Outcome.CLIENT_ERROR)
        return ask, self._manner(ask)

    def calm(self, count: int) -> Iterator[tuple[Ask, Manner]]:
        """Requests of clients that stay."""
        for _ in range(count):
            yield self.ask()[0], STAYS

    def smallest(self) -> Ask:
        return self._asked("unary", Outcome.OK, {})

    def slow(self, count: int) -> Iterator[tuple[Ask, Manner]]:
        """Requests that keep a slot of their model for a while."""
        for _ in range(count):
            yield self._asked("unary", Outcome.OK, {"sleep_s": 0.05}), STAYS

    def endless(self) -> Ask:
        """A stream that is larger than all buffers between the model and the client."""
        return replace(self._asked("stream", Outcome.CANCELLED, {"outputs": 400, "bytes": 64_000}), dialect="stalled")

    def _token(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def _text(self, token: str, script: Script) -> str:
        return json.dumps({**script, "journal": self._journal, "token": token})

    def _asked(self, name: str, outcome: str, script: Script) -> Ask:
        token, dialect = self._token(), DIALECTS[name]
        body = dialect.body_of(self._text(token, script))
        lines = (f"X-Request-ID: {token}", f"Connection: {'keep-alive' if name == RESUMABLE else 'close'}")
        media_type = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        content = post(dialect.path, body, *lines, media_type=media_type)
        return Ask(token, name, content, dialect.outcomes_of, outcome)

    def _message(self) -> Ask:
        """The first message of a WebSocket. It runs as a stream, whose errors have no code for the rule of `unary`."""
        token, unary = self._token(), [each for each in _UNARY if each[1] is not _EXIT]
        pipeline, scripts = self._random.choice([("unary", unary), ("stream", _STREAMED)])
        outcome, script = self._random.choice(scripts)
        message = frame(TEXT, json.dumps({"script": self._text(token, script)}).encode())
        content = handshake(pipeline, f"X-Request-ID: {token}") + message
        return Ask(token, WEBSOCKET, content, of_messages, outcome)

    def _manner(self, ask: Ask) -> Manner:
        """A client that stays reads a resumable stream over up to three connections."""
        choose, pieces = self._random, self._random.choice([1, 1, 1, 4])
        if self._clients_leave and choose.random() < _LEAVES:
            while_sending = Manner(pieces=pieces, leaves_after_sent=choose.randrange(len(ask.content)))
            if ask.is_resumable:
                return choose.choice([while_sending, Manner(pieces=pieces, then="leaves")])
            soon = Manner(pieces=pieces, leaves_after_s=choose.random() * 0.05)
            return choose.choice(
                [while_sending, soon, Manner(pieces=pieces, leaves_after_received=choose.randrange(1, 1000))]
            )
        if not ask.is_resumable:
            return Manner(pieces=pieces)
        drops = tuple(choose.choices(range(1, 5), k=choose.randrange(3)))
        return Manner(pieces=pieces, drops=drops, then=choose.choice(["reads", "reads", "deletes"]))


class SharingTraffic(Traffic):
    """Requests that may share a call to Triton: each answer proves whose it is. Some clients do not wait for it."""

    def ask(self) -> tuple[Ask, Manner]:
        token, item = self._token(), _FIRST_ITEM + self._count

        def outcomes_of(answer: Reply) -> set[str]:
            is_own = answer.status != 200 or json.loads(answer.body) == {"negative": -item, "text": f"of {item}"}
            return of_pipeline(answer) if is_own else {FOREIGN}

        lines = (f"X-Request-ID: {token}", "X-Request-Timeout: 3", "Connection: close")
        content = post("/v1/pipelines/good", {"item": item}, *lines)
        leaves = self._random.random() < _LEAVES_SHARED
        manner = Manner(leaves_after_sent=len(content)) if leaves else STAYS
        return Ask(token, "sharing", content, outcomes_of, Outcome.OK), manner
