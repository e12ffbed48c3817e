"""Messages with invalid HTTP framing."""

import random

from tests.live.chaos.hostile.heads import Hostile
from tests.live.chaos.hostile.values import CANARY

_PATH = b"/v1/pipelines/scripted"
_START = b"POST " + _PATH + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = _START + b"Transfer-Encoding: chunked\r\n\r\n"
SHAPES: list[bytes] = [
    _START + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _START + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    _START + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    _START + b"Content-Length: 2, 2\r\n\r\n{}",
    _START + b"Content-Length: -1\r\n\r\n",
    _START + b"Content-Length: 0x2\r\n\r\n{}",
    _START + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    _START + b"Content-Length : 2\r\n\r\n{}",
    _START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    _START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    _START + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"5\r\nhelloo\r\n0\r\n\r\n",
    _CHUNKED + b"-5\r\nhello\r\n",
    _CHUNKED + b"fffffffffffffffff\r\n",
    _CHUNKED + b"5;" + b"a" * 20_000,
    _CHUNKED + b"0\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    _CHUNKED + b"2\n{}\n0\n\n",
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET  /  HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\n\r\n",
    _GET + b"Host: h\r\n\r\n",
    _GET + b"X: a\r\n b\r\n\r\n",
    _GET + b"X\x00Y: a\r\n\r\n",
    _GET + b"X: a\x00b\r\n\r\n",
    _GET + b": a\r\n\r\n",
    _GET + b"no colon\r\n\r\n",
    _GET + b"X: a\n\n",
    _GET + b"A: b\r\n" * 3000 + b"\r\n",
    _GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"CONNECT g:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"\x00" * 100,
    _GET.replace(b"Host: localhost", b"Host: g@evil, " + CANARY.encode()) + b"\r\n",
    _GET + b"Connection: close\r\n\r\n" + _GET + b"\r\n",
]
PARTIAL: list[bytes] = [
    _START + b"Content-Length: 50\r\n\r\n{",
    _CHUNKED + b"5\r\nhel",
    _START + b"X: a",
    b"POST /v1/pip",
    _CHUNKED,
    _START + b"Content-Length: 8388608\r\n\r\n" + b"a" * 5000,
]
"""The client disconnects after sending them."""


def hostile_framing(choose: random.Random) -> Hostile:
    if choose.random() < 0.3:
        return Hostile("framing: partial", choose.choice(PARTIAL), is_exact=False, leaves=True)
    shape = choose.choice(SHAPES)
    if choose.random() < 0.3:
        at = choose.randrange(min(len(shape), 200))
        shape = shape[:at] + choose.choice([b"\r", b"\n", b"\x00", b"\xff", b" ", b":", b"\t"]) + shape[at:]
    return Hostile("framing", shape, is_exact=False)
