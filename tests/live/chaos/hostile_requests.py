"""Generated hostile requests of every dialect: bodies, addresses, headers and framing.

Hostile JSON has values that fit no field, and text that is not valid JSON.
The same seed and index always generate the same request.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CANARY = "sesame"
"""Part of hostile values, addresses and headers. Errors must not repeat it."""
NAME = "poppy"
"""Part of hostile field names. Errors may repeat it."""
RAW = "\ue000%d\ue000"
"""Placeholder for text that no JSON encoder writes."""

TEXTS = [
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000, "-" + "9" * 5000, "0." + "1" * 5000, "1e-400", "-0",
    "9223372036854775808", "18446744073709551616", "1.5", "true", "false", "null", "[]", "{}", '""', "[[]]", "[null]",
    "[[[[1]]]]", "[1,[2]]", "[1,[2,3],[4]]", '[1,"a",null]', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\uffff"',
    f'"{CANARY}"', f'["{CANARY}","{CANARY}"]', f'{{"{NAME}":"{CANARY}"}}', '{"a":1,"a":2}', "01", "+1", "1.", ".5",
    "0x10", "'a'", "[1,]", "[" * 40 + "]" * 40, "[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70,
    '"' + "\\u00e9" * 500 + '"', "[" + "0," * 300 + "0]", "[" + '"",' * 300 + '""]', '"\r\nevent: done\r\n\r\n"',
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, -(2**31), 2**53, 2**62, 2**63, 2**64, -(2**63) - 1, 10**30, 0.1, 1e308, "", "x",
    CANARY, CANARY * 50, "\x00", "\r\nX-Injected: 1\r\n", "data: {}\n\nevent: error\n\n", "\u2028", "\ufeff",
    "../../etc/passwd", "$(id)", "%s%n", "{{7*7}}", "=" * 60, "*not base64*", "data:image/png;base64,",
    "data:;base64,AAAA", [], [[]], {}, [None], [[1, 2], [3]], [1, "a"], [True], {"b64": "AAAA"}, [2**62], [-1], [0],
    [2**31, 2**31, 2**31], [1] * 40, [""] * 200, [[0.5] * 3] * 20, {NAME: CANARY},
    {str(index): index for index in range(50)},
]  # fmt: skip
FIELD_NAMES = [
    "", NAME, "early_exit", "id", "event", "retry", "data", "__class__", "constructor", "__proto__", "\x00", "a" * 3000,
    "inputs", "outputs", "parameters", "shape", "datatype", "name", "sequence_id", "sequence_start", "sequence_end",
    "priority", "timeout", "headers", "binary_data_output", "binary_data_size", "binary_data", "classification",
    "triton_final_response", "triton_enable_empty_final_response", "shared_memory_region", "shared_memory_byte_size",
    "shared_memory_offset", "triton_grpc_error", "BOOL", "X", "INPUT",
]  # fmt: skip
DATATYPES = ["", "FP32", "FP64", "BYTES", "BOOL", "INT8", "UINT64", "FP128", "STRING", "bf16", "BF16", CANARY, 5, None]

Change = Callable[[random.Random, Any], str]
"""Each function converts a JSON value to hostile text."""


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        found += [(value, key), *places(below)]
    return found


def replaced(choose: random.Random, value: Any) -> str:
    """Replaces one or several values, a few of them with text that no encoder writes."""
    value, raws = copy.deepcopy(value), []
    for _ in range(choose.choice([1, 1, 1, 2, 4])):
        found = places(value)
        if not found:
            break
        container, key = choose.choice(found)
        if key == "datatype":
            container[key] = choose.choice(DATATYPES)
        elif choose.random() < 0.4:
            container[key] = RAW % len(raws)
            raws.append(choose.choice(TEXTS))
        else:
            container[key] = copy.deepcopy(choose.choice(VALUES))
    text = _text(value)
    for index, raw in enumerate(raws):
        text = text.replace(_text(RAW % index), raw)
    return text


def renamed(choose: random.Random, value: Any) -> str:
    """Removes, renames or adds a key."""
    value = copy.deepcopy(value)
    objects = [
        each for each in [value, *(container[key] for container, key in places(value))] if isinstance(each, dict)
    ]
    target = choose.choice(objects)
    key = choose.choice([*target, None])
    if key is not None and choose.random() < 0.7:
        moved = target.pop(key)
        if choose.random() < 0.5:
            target[choose.choice(FIELD_NAMES)] = moved
    else:
        target[choose.choice(FIELD_NAMES)] = copy.deepcopy(choose.choice(VALUES))
    return _text(value)


def repeated(choose: random.Random, value: Any) -> str:
    """Repeats a key or an element, or adds a thousand unknown keys."""
    text = _text(value)
    if choose.random() < 0.5 and isinstance(value, dict) and value:
        key = choose.choice(list(value))
        return text[:-1] + f", {_text(key)}: {_text(choose.choice(VALUES))}}}"
    value = copy.deepcopy(value)
    lists = [container[key] for container, key in places(value) if isinstance(container[key], list) and container[key]]
    if lists:
        found = choose.choice(lists)
        found *= choose.choice([2, 3, 50, 200])
    else:
        value |= {f"{NAME}{index}": index for index in range(1000)}
    return _text(value)


def nested(choose: random.Random, value: Any) -> str:
    """Nests a value slightly or far too deep."""
    depth = choose.choice([65, 200, 5000, 100_000])
    opening, closing = choose.choice([("[", "]"), ('{"a":', "}")])
    bomb = opening * depth + "1" + closing * choose.choice([0, depth])
    if not isinstance(value, dict) or choose.random() < 0.3:
        return bomb
    return _text({**value, choose.choice([*value, NAME]): RAW % 0}).replace(_text(RAW % 0), bomb)


CHANGES: list[Change] = [replaced, replaced, replaced, replaced, renamed, renamed, repeated, nested]


def no_json(choose: random.Random, text: bytes) -> bytes:
    """Returns bytes that are not valid JSON, or not UTF-8."""
    at = choose.randrange(len(text) + 1)
    forms: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: text[:at],
        lambda: text[:at] + bytes([choose.randrange(256)]) + text[at + 1 :],
        lambda: text[:at] + choose.randbytes(8) + text[at:],
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text.decode().encode("utf-16"),
        lambda: text.decode().encode("utf-32"),
        lambda: text + choose.choice([b"}", b" x", b"\x00", text, b"\n[]"]),
        lambda: text.replace(b'"', b"'"),
        lambda: choose.randbytes(choose.randrange(200)),
        lambda: b"\x00" * choose.randrange(1, 50),
        lambda: b'"' + CANARY.encode() + b"\xff\xfe" + b'"',
    ]
    return choose.choice(forms)()


def hostile_json(choose: random.Random, value: Any) -> bytes:
    if choose.random() < 0.25:
        return no_json(choose, _text(value).encode())
    return choose.choice(CHANGES)(choose, value).encode("utf-8", "surrogatepass")


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


PNG = b"\x89PNG\r\n\x1a\n"
BOUNDARY = "frontier"
_HEADER = "Inference-Header-Content-Length"
_HEADERS = 0.08
NAMES = [
    "..", "%2e%2e", "%2F", "a%00b", "%ff", "*", "-", "", CANARY, "a" * 2000, "scripted%20", "SCRIPTED", "scripted.",
    "%F0%9F%99%82", "scripted/versions/1", "scripted;v=1", "<script>", "'or'1'='1", "con", "0",
]  # fmt: skip
VERSIONS = ["1", "0", "-1", "2", "99999999999999999999", "latest", "1.0", "%31", "..", CANARY, "1" * 400]
HEADERS: list[tuple[str, str]] = [
    ("X-Request-ID", "a b"), ("X-Request-ID", "<script>" + CANARY), ("X-Request-ID", "a" * 129), ("X-Request-ID", ""),
    ("X-Request-ID", "same"), ("X-Request-Timeout", "nan"), ("X-Request-Timeout", "-1"), ("X-Request-Timeout", "1e400"),
    ("X-Request-Timeout", "soon"), ("X-Request-Timeout", "0"), ("X-Request-Timeout", "1_0"),
    ("X-Request-Timeout", "9" * 400), ("Content-Type", ""), ("Content-Type", "text/plain"),
    ("Content-Type", "application/json; charset=utf-16"), ("Content-Type", "application/x-www-form-urlencoded"),
    ("Content-Type", "multipart/form-data"), ("Content-Type", CANARY),
    ("Content-Type", "multipart/form-data; boundary=" + "b" * 100), ("Content-Type", "application/octet-stream"),
    ("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Content-Encoding", "gzip, gzip"),
    ("Content-Encoding", CANARY), ("Accept", "image/png;q=x"), ("Accept", "*/*;q=0"), ("Accept", CANARY),
    ("Accept-Encoding", "gzip"), ("Range", "bytes=0-1"), ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),
    ("traceparent", CANARY), ("tracestate", "a=" + "b" * 600), ("Last-Event-ID", "-1"), ("Last-Event-ID", "9" * 30),
    ("Last-Event-ID", "1 OR 1=1"), ("Last-Event-ID", "\u0661"), ("Inference-Header-Content-Length", "-1"),
    ("Inference-Header-Content-Length", "0"), ("Inference-Header-Content-Length", "9" * 20),
    ("Inference-Header-Content-Length", "1e3"), ("Authorization", "Bearer " + CANARY), ("Authorization", "Basic ="),
    ("X-API-Key", CANARY), ("Expect", "100-continue"), ("Upgrade", "h2c"), ("Connection", "upgrade"),
    ("Origin", "https://" + CANARY), ("Cookie", "a=" + CANARY), ("X-Forwarded-For", "127.0.0.1, " + CANARY),
    ("Host", CANARY), ("X-HTTP-Method-Override", "DELETE"), ("X-Explain", "1"), ("X-Long", "a" * 4000),
    ("X-" + "Long" * 30, "a"), ("TE", "trailers"), ("Content-Language", "\t"), ("Content-Length", "+1"),
]  # fmt: skip
BODIES = """
pipelines /v1/pipelines/scripted {"script": "{}"}
pipelines /v1/pipelines/scripted_large {"file": "YSBzbWFsbCBmaWxl", "sleep_ms": 0}
pipelines /v1/pipelines/write {"prompt": "a", "max_tokens": 1, "temperature": 0.5, "seed": 1, "chunk_tokens": 1}
pipelines /v1/pipelines/insights {"text": "a match", "topics": ["sport", "food"], "sentiments": ["good", "bad"]}
pipelines /v1/pipelines/embed {"text": "a dog"}
pipelines /v1/pipelines/ocr {"image": "R0lGODlhIG5vIGltYWdl"}
streamed /v1/pipelines/scripted_stream/stream {"script": "{\\"outputs\\": 1}"}
streamed /v1/pipelines/write/stream {"prompt": "a", "max_tokens": 1}
resumable /v1/streams {"pipeline": "scripted_stream", "inputs": {"script": "{\\"outputs\\": 1}"}}
infer /v2/models/typed_echo/infer {"id": "a", "inputs": [{"name": "INT32", "datatype": "INT32", "shape": [1, 2], \
"data": [[1, 2]]}], "outputs": [{"name": "INT32_OUT"}]}
infer /v2/models/typed_echo/infer {"inputs": [{"name": "BYTES", "datatype": "BYTES", "shape": [1, 2], \
"data": ["a", "b"]}, {"name": "BOOL", "datatype": "BOOL", "shape": [1, 1], "data": [true]}]}
infer /v2/models/batched_echo/infer {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], \
"data": [1, 2, 3]}], "parameters": {"custom": 1}}
infer /v2/models/text_embed/infer {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}
generate /v2/models/repeat_text/generate {"PROMPT": "a", "STREAM": false, "input_ids": [1, 2], \
"parameters": {"SHOW": false}}
generate /v2/models/repeat_text/generate_stream {"PROMPT": "a", "STREAM": false, "input_ids": [1, 2]}
openai /v1/completions {"model": "write", "prompt": "a", "max_tokens": 1, "temperature": 1, "stop": ["b"], "seed": 1}
openai /v1/completions {"model": "scripted_stream", "prompt": "{\\"outputs\\": 1}", "stream": true}
openai /v1/chat/completions {"model": "write", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
openai /v1/embeddings {"model": "embed", "input": "a", "encoding_format": "float"}
"""
"""Kind of request, address and valid body."""
ROWS = [line.split(maxsplit=2) for line in BODIES.strip().split("\n")]
_KINDS = [*dict.fromkeys(kind for kind, *_ in ROWS), "pipelines", "infer", "openai"]
BINARY: list[tuple[str, dict[str, Any], bytes]] = [
    (
        "batched_echo",
        {
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}],
            "parameters": {"binary_data_output": True},
        },
        struct.pack("<3f", 1, 2, 3),
    ),
    (
        "typed_echo",
        {"inputs": [{"name": "BYTES", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}]},
        struct.pack("<I", 1) + b"a",
    ),
]


def json_body(choose: random.Random) -> Request:
    kind = choose.choice(_KINDS)
    _, path, body = choose.choice([row for row in ROWS if row[0] == kind])
    return Request(kind, path, hostile_json(choose, json.loads(body)))


def infer_binary(choose: random.Random) -> Request:
    """The JSON, its length, the sizes and the following bytes contradict each other."""
    name, body, raw = choose.choice(BINARY)
    text = hostile_json(choose, body) if choose.random() < 0.5 else json.dumps(body).encode()
    if choose.random() < 0.5:
        raw = choose.choice([b"", raw[:-1], raw + b"\0", raw * 100, b"\xff" * len(raw), struct.pack("<I", 2**31) + raw])
    length = choose.choice([len(text)] * 4 + [len(text) - 1, len(text) + 1, 0, -1, len(text) + len(raw), 10**9, 2**64])
    return Request("infer, binary", f"/v2/models/{name}/infer", text + raw, headers=[(_HEADER, str(length))])


def form(choose: random.Random) -> Request:
    """Parts without names, duplicate parts, hundreds of parts, no end, and hostile headers and boundaries."""
    name = choose.choice(["file", "file", "image", "count", "script", NAME, "", "a\r\nb", 'a"b', "\ufeff"])
    head = choose.choice(
        [
            f'Content-Disposition: form-data; name="{name}"; filename="{NAME}\r\nX: y"',
            f'Content-Disposition: form-data; name="{name}"',
            f"Content-Disposition: form-data; name={name}; filename*=utf-8''%ff",
            "Content-Disposition: attachment",
            "Content-Type: text/plain",
            "X: " + "a" * 9000,
            'Content-Disposition: form-data; name="file"\r\nContent-Transfer-Encoding: base64',
            'Content-Disposition: form-data; name="file"\r\nContent-Type: multipart/mixed; boundary=x',
        ]
    )
    part = f"--{BOUNDARY}\r\n{head}\r\n\r\n{choose.choice(['', 'a', CANARY, '5', '[]', 'a' * 5000])}\r\n"
    body = (
        part * choose.choice([0, 1, 1, 2, 128, 129, 400]) + f"--{BOUNDARY}{choose.choice(['--', '--', '', '-'])}\r\n"
    ).encode()
    boundary = choose.choice([BOUNDARY] * 6 + ["", "x" * 71, "a b", '"', f'"{BOUNDARY}"'])
    path = f"/v1/pipelines/{choose.choice(['scripted_large', 'ocr', 'scripted', 'write'])}"
    if choose.random() < 0.3:
        body = body[: choose.randrange(len(body))]
    return Request("form", path, body, f"multipart/form-data; boundary={boundary}")


def raw(choose: random.Random) -> Request:
    name = choose.choice(["scripted_large", "scripted_large", "ocr", "scripted"])
    query = choose.choice(
        ["", "?count=1", "?count=-1", "?count=1e400", f"?{NAME}={CANARY}", "?count=1&count=2", "?count=%00",
        "?" + "a&" * 500, "?count=" + "9" * 5000]
    )  # fmt: skip
    media_type = choose.choice(["application/octet-stream", "image/png", "image/../png", "image/", "*/*"])
    body = choose.choice(
        [b"", PNG, PNG + choose.randbytes(50), choose.randbytes(300), b"\xff\xd8\xff", CANARY.encode()]
    )
    return Request("raw", f"/v1/pipelines/{name}{query}", body, media_type)


def hostile_address(choose: random.Random) -> Request:
    """Names, versions, methods and paths that do not exist."""
    name, version = choose.choice(NAMES), choose.choice(VERSIONS)
    paths = [
        f"/v1/pipelines/{name}", f"/v1/pipelines/{name}/stream", f"/v1/streams/{name}",
        f"/v1/streams/{choose.randbytes(16).hex()}", f"/v2/models/{name}/infer", f"/v2/models/{name}",
        f"/v2/models/scripted/versions/{version}/infer", f"/v2/models/{name}/ready",
        f"/v2/models/typed_echo/versions/{version}/generate", f"/v2/models/{name}/config", f"/v2/models/{name}/stats",
        "/v2/repository/index", "/v2/repository/models/scripted/unload", "/v2/systemsharedmemory/region/x/register",
        "/v2/logging", "/v2/trace/setting", "/metrics", f"/v1/models/{name}", f"//v1//pipelines//{name}",
        f"/v1/pipelines/../{name}", f"/{name}", f"http://evil/{name}", f"/v1/requests/{name}/explain",
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


DIALECTS: list[Callable[[random.Random], Request]] = [
    *[json_body] * 9,
    *(infer_binary, form, raw, hostile_address),
]
FRAMING = 0.06


def hostile(seed: int, index: int) -> Hostile:
    choose = random.Random(f"{seed} {index}")
    if choose.random() < FRAMING:
        return hostile_framing(choose)
    request = choose.choice(DIALECTS)(choose)
    has_hostile_headers = choose.random() < _HEADERS
    if has_hostile_headers:
        request.headers += choose.sample(HEADERS, choose.choice([1, 1, 2, 5]))
    return Hostile(request.kind, request.content(), is_exact=not has_hostile_headers)


def valid() -> list[Request]:
    """One request of each dialect; every answer is 200."""
    requests = [
        Request(kind, path, body.encode())
        for kind, path, body in ROWS
        if kind != "resumable" and not path.endswith(("/ocr", "/generate_stream"))
    ]
    for name, body, raw_tensor in BINARY:
        text = json.dumps(body).encode()
        length = [(_HEADER, str(len(text)))]
        requests.append(Request("binary", f"/v2/models/{name}/infer", text + raw_tensor, headers=length))
    return requests
