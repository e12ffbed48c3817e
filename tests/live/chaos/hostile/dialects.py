"""Valid requests of every dialect, and the mutations that make them hostile."""

import base64
import gzip
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from tests.live.chaos.hostile.messages import (
    HEADERS,
    Hostile,
    Request,
    hostile_address,
    hostile_framing,
)
from tests.live.chaos.hostile.values import CANARY, NAME, hostile_json

FILE = base64.b64encode(b"a small file").decode()
PNG = b"\x89PNG\r\n\x1a\n"
BOUNDARY = "frontier"
_HEADER = "Inference-Header-Content-Length"
_HEADERS = 0.08

PIPELINES: list[tuple[str, dict[str, Any]]] = [
    ("scripted", {"script": "{}"}),
    ("scripted_large", {"file": FILE, "sleep_ms": 0}),
    ("write", {"prompt": "a", "max_tokens": 1, "temperature": 0.5, "seed": 1, "chunk_tokens": 1}),
    ("insights", {"text": "a good match", "topics": ["sport", "food"], "sentiments": ["good", "bad"]}),
    ("embed", {"text": "a dog"}),
    ("ocr", {"image": base64.b64encode(b"GIF89a no image").decode()}),
]
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("scripted_stream", {"script": '{"outputs": 1}'}),
    ("write", {"prompt": "a", "max_tokens": 1}),
]
OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "write", "prompt": "a", "max_tokens": 1, "temperature": 1, "stop": ["b"], "seed": 1}),
    ("/v1/completions", {"model": "scripted_stream", "prompt": '{"outputs": 1}', "stream": True}),
    ("/v1/chat/completions", {"model": "write", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/embeddings", {"model": "embed", "input": "a", "encoding_format": "float"}),
]


def _tensor(name: str, datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


INFER: list[tuple[str, dict[str, Any]]] = [
    ("typed_echo", {"id": "a", "inputs": [_tensor("INT32", "INT32", [1, 2], data=[[1, 2]])],
    "outputs": [{"name": "INT32_OUT"}]}),
    ("typed_echo", {"inputs": [_tensor("BYTES", "BYTES", [1, 2], data=["a", "b"]), _tensor("BOOL", "BOOL", [1, 1],
    data=[True])]}),
    ("batched_echo", {"inputs": [_tensor("X", "FP32", [1, 3], data=[1, 2, 3])], "parameters": {"custom": 1}}),
    ("text_embed", {"inputs": [_tensor("TEXT", "BYTES", [1, 1], data=["a"])]}),
]  # fmt: skip
BINARY: list[tuple[str, dict[str, Any], bytes]] = [
    (
        "batched_echo",
        {"inputs": [_tensor("X", "FP32", [1, 3], parameters={"binary_data_size": 12})],
        "parameters": {"binary_data_output": True}},
        struct.pack("<3f", 1, 2, 3),
    ),
    (
        "typed_echo",
        {"inputs": [_tensor("BYTES", "BYTES", [1, 1], parameters={"binary_data_size": 5})]},
        struct.pack("<I", 1) + b"a",
    ),
]  # fmt: skip
GENERATE: dict[str, Any] = {"PROMPT": "a", "STREAM": False, "input_ids": [1, 2], "parameters": {"SHOW": False}}


def pipeline(choose: random.Random) -> Request:
    name, body = choose.choice(PIPELINES)
    return Request("pipelines", f"/v1/pipelines/{name}", hostile_json(choose, body))


def pipeline_stream(choose: random.Random) -> Request:
    name, body = choose.choice(STREAMED)
    return Request("pipelines, streamed", f"/v1/pipelines/{name}/stream", hostile_json(choose, body))


def streams(choose: random.Random) -> Request:
    return Request(
        "resumable streams",
        "/v1/streams",
        hostile_json(choose, {"pipeline": "scripted_stream", "inputs": {"script": '{"outputs": 1}'}}),
    )


def infer(choose: random.Random) -> Request:
    name, body = choose.choice(INFER)
    return Request("infer", f"/v2/models/{name}/infer", hostile_json(choose, body))


def infer_binary(choose: random.Random) -> Request:
    """The JSON, its length, the sizes and the following bytes contradict each other."""
    name, body, raw = choose.choice(BINARY)
    text = hostile_json(choose, body) if choose.random() < 0.5 else json.dumps(body).encode()
    if choose.random() < 0.5:
        raw = choose.choice([b"", raw[:-1], raw + b"\0", raw * 100, b"\xff" * len(raw), struct.pack("<I", 2**31) + raw])
    length = choose.choice([len(text)] * 4 + [len(text) - 1, len(text) + 1, 0, -1, len(text) + len(raw), 10**9, 2**64])
    return Request("infer, binary", f"/v2/models/{name}/infer", text + raw, headers=[(_HEADER, str(length))])


def generate(choose: random.Random) -> Request:
    method = choose.choice(["generate", "generate_stream"])
    return Request(method, f"/v2/models/repeat_text/{method}", hostile_json(choose, GENERATE))


def openai(choose: random.Random) -> Request:
    path, body = choose.choice(OPENAI)
    return Request("openai", path, hostile_json(choose, body))


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


def compressed(choose: random.Random) -> Request:
    """Compression bombs with a factor of 1,000, truncated and nested data, and text that is not compressed."""
    inner = choose.choice([json.dumps(INFER[0][1]).encode(), b" " * 200_000, b"[" * 100_000, b'{"inputs":[]}'])
    body = gzip.compress(inner)
    body = choose.choice([body, body[:-4], gzip.compress(body), body + b"x", inner[:2000]])
    path = choose.choice(["/v2/models/typed_echo/infer", "/v1/pipelines/scripted", "/v1/completions"])
    encoding = choose.choice(["gzip", "deflate", "GZIP", "gzip, deflate", "x-gzip"])
    return Request("compressed", path, body, headers=[("Content-Encoding", encoding)])


DIALECTS: list[Callable[[random.Random], Request]] = [
    pipeline, pipeline, pipeline_stream, streams, infer, infer, infer_binary, generate, openai, openai, form, raw,
    compressed,
    hostile_address,
]  # fmt: skip
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
        Request("pipelines", f"/v1/pipelines/{name}", json.dumps(body).encode()) for name, body in PIPELINES[:-1]
    ]
    requests += [
        Request("streamed", f"/v1/pipelines/{name}/stream", json.dumps(body).encode()) for name, body in STREAMED
    ]
    requests += [Request("openai", path, json.dumps(body).encode()) for path, body in OPENAI]
    requests += [Request("infer", f"/v2/models/{name}/infer", json.dumps(body).encode()) for name, body in INFER]
    for name, body, raw_tensor in BINARY:
        text = json.dumps(body).encode()
        length = [(_HEADER, str(len(text)))]
        requests.append(Request("binary", f"/v2/models/{name}/infer", text + raw_tensor, headers=length))
    requests.append(Request("generate", "/v2/models/repeat_text/generate", json.dumps(GENERATE).encode()))
    return requests
