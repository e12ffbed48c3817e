"""Hostile request lines, headers and framing, and requests as bytes."""

import random
from dataclasses import dataclass, field

from tests.live.chaos.hostile.values import CANARY

NAMES = [
    "..", "%2e%2e", "%2F", "a%00b", "%ff", "*", "-", "", CANARY, "a" * 2000, "scripted%20", "SCRIPTED",
    "scripted.", "%F0%9F%99%82",
    "scripted/versions/1", "scripted;v=1", "<script>", "'or'1'='1", "con", "0",
]  # fmt: skip
VERSIONS = ["1", "0", "-1", "2", "99999999999999999999", "latest", "1.0", "%31", "..", CANARY, "1" * 400]
HEADERS: list[tuple[str, str]] = [
    ("X-Request-ID", "a b"), ("X-Request-ID", "<script>" + CANARY), ("X-Request-ID", "a" * 129), ("X-Request-ID",
    ""),
    ("X-Request-ID", "same"), ("X-Request-Timeout", "nan"), ("X-Request-Timeout", "-1"), ("X-Request-Timeout",
    "1e400"),
    ("X-Request-Timeout", "soon"), ("X-Request-Timeout", "0"), ("X-Request-Timeout", "1_0"), ("X-Request-Timeout",
    "9" * 400),
    ("Content-Type", ""), ("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Type", "application/x-www-form-urlencoded"), ("Content-Type", "multipart/form-data"),
    ("Content-Type", CANARY),
    ("Content-Type", "multipart/form-data; boundary=" + "b" * 100), ("Content-Type", "application/octet-stream"),
    ("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Content-Encoding", "gzip, gzip"),
    ("Content-Encoding", CANARY),
    ("Accept", "image/png;q=x"), ("Accept", "*/*;q=0"), ("Accept", CANARY), ("Accept-Encoding", "gzip"), ("Range",
    "bytes=0-1"),
    ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"), ("traceparent", CANARY), ("tracestate",
    "a=" + "b" * 600),
    ("Last-Event-ID", "-1"), ("Last-Event-ID", "9" * 30), ("Last-Event-ID", "1 OR 1=1"), ("Last-Event-ID",
    "\u0661"),
    ("Inference-Header-Content-Length", "-1"), ("Inference-Header-Content-Length", "0"),
    ("Inference-Header-Content-Length", "9" * 20),
    ("Inference-Header-Content-Length", "1e3"), ("Authorization", "Bearer " + CANARY), ("Authorization",
    "Basic ="), ("X-API-Key", CANARY),
    ("Expect", "100-continue"), ("Upgrade", "h2c"), ("Connection", "upgrade"), ("Origin", "https://" + CANARY),
    ("Cookie", "a=" + CANARY),
    ("X-Forwarded-For", "127.0.0.1, " + CANARY), ("Host", CANARY), ("X-HTTP-Method-Override", "DELETE"),
    ("X-Explain", "1"),
    ("X-Long", "a" * 4000), ("X-" + "Long" * 30, "a"), ("TE", "trailers"), ("Content-Language", "\t"),
    ("Content-Length", "+1"),
]  # fmt: skip


@dataclass(frozen=True)
class Hostile:
    """``is_exact``: whether the end of the answer is defined, so that the connection can be used again."""

    kind: str
    content: bytes
    is_exact: bool = True
    leaves: bool = False
    """The client sends this and disconnects."""


@dataclass
class Request:
    kind: str
    path: str
    body: bytes = b""
    media_type: str = "application/json"
    method: str = "POST"
    headers: list[tuple[str, str]] = field(default_factory=list)

    def content(self) -> bytes:
        own = [("Host", "localhost"), ("Content-Type", self.media_type), ("Content-Length", str(len(self.body)))]
        given = {name.lower() for name, _ in self.headers}
        lines = [
            f"{name}: {value}"
            for name, value in own + self.headers
            if (name, value) in self.headers or name.lower() not in given
        ]
        head = "\r\n".join([f"{self.method} {self.path} HTTP/1.1", *lines])
        return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n" + self.body


def hostile_address(choose: random.Random) -> Request:
    """Names, versions, methods and paths that do not exist."""
    name, version = choose.choice(NAMES), choose.choice(VERSIONS)
    paths = [
        f"/v1/pipelines/{name}", f"/v1/pipelines/{name}/stream", f"/v1/streams/{name}",
        f"/v1/streams/{choose.randbytes(16).hex()}",
        f"/v2/models/{name}/infer", f"/v2/models/{name}", f"/v2/models/scripted/versions/{version}/infer",
        f"/v2/models/{name}/ready",
        f"/v2/models/typed_echo/versions/{version}/generate", f"/v2/models/{name}/config",
        f"/v2/models/{name}/stats", "/v2/repository/index",
        "/v2/repository/models/scripted/unload", "/v2/systemsharedmemory/region/x/register", "/v2/logging",
        "/v2/trace/setting", "/metrics",
        f"/v1/models/{name}", f"//v1//pipelines//{name}", f"/v1/pipelines/../{name}", f"/{name}",
        f"http://evil/{name}", f"/v1/requests/{name}/explain",
        f"/docs/errors/{name}", f"/?{name}={name}", "/v1/pipelines/scripted?" + "&".join(["a=b"] * 300),
        f"/v1/pipelines/scripted?script={name}",
    ]  # fmt: skip
    method = choose.choice(["POST", "GET", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE", "FOO"])
    body = b"" if method in {"GET", "HEAD"} else choose.choice([b"", b"{}", b'{"inputs":[]}'])
    return Request("address", choose.choice(paths), body, method=method)


_PATH = b"/v1/pipelines/scripted"
_START = b"POST " + _PATH + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = _START + b"Transfer-Encoding: chunked\r\n\r\n"
SHAPES: list[bytes] = [
    _START + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    _START + b"Content-Length: -1\r\n\r\n",
    _START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"GET  /  HTTP/1.1\r\nHost: localhost\r\n\r\n",
    _GET + b"X\x00Y: a\r\n\r\n",
    _GET + b": a\r\n\r\n",
    _GET + b"no colon\r\n\r\n",
    _GET + b"A: b\r\n" * 3000 + b"\r\n",
    _GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"\x00" * 100,
    _GET.replace(b"Host: localhost", b"Host: g@evil, " + CANARY.encode()) + b"\r\n",
    _GET + b"Connection: close\r\n\r\n" + _GET + b"\r\n",
]
"""A few of each sort, which are changed at random: `tests/http1` has every form."""
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
