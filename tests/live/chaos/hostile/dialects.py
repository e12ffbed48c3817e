"""Valid requests of every dialect, and the mutations that make them hostile."""

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

PNG = b"\x89PNG\r\n\x1a\n"
BOUNDARY = "frontier"
_HEADER = "Inference-Header-Content-Length"
_HEADERS = 0.08


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


def compressed(choose: random.Random) -> Request:
    """Compression bombs with a factor of 1,000, truncated and nested data, and text that is not compressed."""
    inner = choose.choice(
        [
            next(body for kind, _, body in ROWS if kind == "infer").encode(),
            b" " * 200_000,
            b"[" * 100_000,
            b'{"inputs":[]}',
        ]
    )
    body = gzip.compress(inner)
    body = choose.choice([body, body[:-4], gzip.compress(body), body + b"x", inner[:2000]])
    path = choose.choice(["/v2/models/typed_echo/infer", "/v1/pipelines/scripted", "/v1/completions"])
    encoding = choose.choice(["gzip", "deflate", "GZIP", "gzip, deflate", "x-gzip"])
    return Request("compressed", path, body, headers=[("Content-Encoding", encoding)])


DIALECTS: list[Callable[[random.Random], Request]] = [
    *[json_body] * 9,
    *(infer_binary, form, raw, compressed, hostile_address),
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
