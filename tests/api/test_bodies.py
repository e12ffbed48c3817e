"""The formats of a body, the errors before a body reaches a pipeline, and its limits at each address."""

import asyncio
import base64
import json
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import numpy as np
import pytest

from app.api.bodies import MAX_QUERY_FIELDS, SWITCH_S, Limits, read_body
from app.api.exchange import ByteBudget
from app.api.pipelines.pipeline_endpoints import read_inference
from app.core.errors import ClientClosedRequest
from app.core.inference import ELEMENT, Deadline
from app.pipelines.body import BodyReader
from app.pipelines.pipeline import Pipeline
from tests.api.conftest import FINAL, PNG, READER, WRITER, counted, scripted_fixture, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import exchange_with
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.waiting import PATIENCE_S

URL = "/v1/pipelines/read"
WRITE = "/v1/pipelines/write"


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    assert len(answer.content) <= 4096
    return answer.status_code, answer.json()["code"]


def sent(content: Any, media_type: str, **headers: str) -> dict[str, Any]:
    return {"content": content, "headers": {"Content-Type": media_type, **headers}}


JSON = b'{"image": "%s"}' % base64.b64encode(PNG)
FORM = "multipart/form-data; boundary="


@pytest.mark.parametrize(
    ("body", "inputs", "n"),
    [
        *((sent(JSON, each), [[PNG]], 3) for each in ("application/json", "application/json; charset=utf-8")),
        (sent(JSON, "application/x+json"), [[PNG]], 3),
        ({"files": {"image": PNG}, "data": {"note": "ü", "n": "5"}}, [[PNG], ["ü".encode()]], 5),
        ({"files": {"image": PNG}, "headers": {"Content-Type": FORM + "x" * 70}}, [[PNG]], 3),
        *((sent(PNG, each) | {"params": {"n": "7"}}, [[PNG]], 7) for each in ("image/png", "IMAGE/PNG")),
        (sent(PNG, "application/octet-stream") | {"params": {"n": "7"}}, [[PNG]], 7),
        (sent(PNG, "image/png", **{"Content-Encoding": "identity"}), [[PNG]], 3),
    ],
)
async def test_json_forms_and_raw_bytes_reach_the_model(api: Served, body: Any, inputs: list[Any], n: int) -> None:
    answer = await api.client.post(URL, **body)
    assert (answer.status_code, answer.json()) == (200, {"text": "hi", "scores": [0.5, None], "early_exit": None})
    assert [tensor.array.tolist() for tensor in api.engine.requests[0].inputs] == inputs
    assert api.engine.requests[0].parameters == {"n": n}


@pytest.mark.parametrize("size", [1024, 2 * 1024 * 1024])
async def test_files_are_not_decoded_as_json_or_written_to_disk(
    roomy: Served, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    monkeypatch.setattr(BodyReader, "from_json", None)
    monkeypatch.setattr("app.pipelines.body._decoded", None)
    content = PNG + b"\xff" * size
    for body in ({"files": {"image": content}}, sent(content, "image/png")):
        assert (await roomy.client.post(URL, **body)).status_code == 200
        assert roomy.engine.requests[-1].inputs[0].array.tolist() == [content]


def part(disposition: bytes, content: bytes = b"") -> bytes:
    return b"--x\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n--x--\r\n" % (disposition, content)


UNSUPPORTED, TOO_LARGE = (415, "unsupported_media_type"), (413, "payload_too_large")
MALFORMED, INVALID = (400, "invalid_request"), (422, "invalid_input")
CONTENT_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "application", "a/b/c", ";", "\xff")
MANY_FIELDS = "&".join(f"f{index}" for index in range(MAX_QUERY_FIELDS))
DATA_URL = f"data:text/plain;base64,{base64.b64encode(PNG).decode()}"
REFUSALS: dict[tuple[tuple[int, str], str, str], list[tuple[str, dict[str, Any]]]] = {
    (UNSUPPORTED, "hint", "-H 'Content-Type: application/json'"): [
        *((URL, {"content": b"{}", "headers": {b"Content-Type": each.encode("latin-1")}}) for each in CONTENT_TYPES),
        *(("/v1/streams", sent(b"{}", each)) for each in ("", "text/json", "text/plain; x=json", "application/jsonl")),
        ("/v1/streams", sent(b"{}", "multipart/form-data")),
    ],
    (TOO_LARGE, "hint", "GATEWAY_MAX_BODY_BYTES"): [
        (URL, sent(b"{}", "application/json", **{"Content-Length": "9" * 400}))
    ],
    (MALFORMED, "detail", "The multipart body is malformed or above a limit: 128 parts"): [
        (URL, sent(part(b'name="n"'), "multipart/form-data")),
        (URL, sent(part(b'name="n"'), FORM)),
        (URL, sent(b"garbage", f"{FORM}x")),
        (URL, sent(b'--xy\r\nContent-Disposition: form-data; name="n"\r\n\r\n1\r\n--x--', f"{FORM}x")),
        (URL, sent(part(b'name="\xff"'), f"{FORM}x")),
        (URL, sent(b"--x\r\nA: b\r\n" + b"C: d\r\n" * 9000 + b"\r\n\r\n--x--", f"{FORM}x")),
        (URL, {"files": {"image": PNG}, "headers": {"Content-Type": FORM + "x" * 257}}),
        (URL, sent(part(b'name="n"'), f"{FORM}x; a={'y' * 1024}")),
        (URL, {"files": {f"f{index}": b"" for index in range(129)}}),
    ],
    (UNSUPPORTED, "detail", "The charset of a form can only be UTF-8."): [
        (URL, sent(part(b'name="%s"' % name, b"+2AA-"), f"{FORM}x; charset={charset}"))
        for charset in ("utf-7", "utf-16", "undefined", "idna")
        for name in (b"note", b"n", b"+2AA-")
    ],
    (INVALID, "errors", "{'field': 'note', 'problem': 'is not UTF-8 text'}"): [
        (URL, sent(part(b'name="note"', b"\xed\xa0\x80"), f"{FORM}x"))
    ],
    (INVALID, "errors", "[{'field': 'note', 'problem': 'is given twice'}]"): [
        (URL, {"files": [("image", PNG), ("note", b"a"), ("note", b"b")]})
    ],
    (INVALID, "errors", "[{'field': 'image', 'problem': 'is given twice'}]"): [
        (f"{URL}?image=x", sent(PNG, "image/png"))
    ],
    (INVALID, "errors", "[{'field': 'n', 'problem': 'is given twice'}]"): [(f"{URL}?n=1&n=2", sent(PNG, "image/png"))],
    (INVALID, "errors", "'f0'"): [(f"{URL}?{MANY_FIELDS}", sent(PNG, "image/png"))],
    (MALFORMED, "hint", "in the body"): [
        *((f"{each}?n=5", {"json": {"image": ""}}) for each in (URL, f"{WRITE}/stream", "/v1/streams")),
        (f"{URL}?n=5", {"files": {"image": PNG}}),
    ],
    (UNSUPPORTED, "detail", "The gateway does not decode a Content-Encoding."): [
        (url, sent(b"\x1f\x8b\x08", "application/json", **{"Content-Encoding": each}))
        for url in (URL, "/v1/streams")
        for each in ("gzip", "br", "GZIP, identity", "x")
    ],
    (INVALID, "errors", "media type"): [(URL, {"json": {"image": DATA_URL}})],
    (INVALID, "errors", "not an image"): [(URL, {"files": {"image": b"%PDF"}})],
}


@pytest.mark.parametrize(
    ("problem", "url", "body"), [(problem, *each) for problem, found in REFUSALS.items() for each in found]
)
async def test_a_body_that_does_not_fit_is_refused(
    api: Served, problem: tuple[tuple[int, str], str, str], url: str, body: dict[str, Any]
) -> None:
    refused, member, text = problem
    answer = await api.client.post(url, **body)
    assert refusal(answer) == refused
    assert text in str(answer.json()[member])
    assert not api.engine.requests


async def test_too_many_query_fields_are_400_before_the_body_is_read(api: Served) -> None:
    async def never() -> Any:
        raise AssertionError
        yield b""

    answer = await api.client.post(f"{URL}?{MANY_FIELDS}&more", **sent(never(), "image/png"))
    assert refusal(answer) == MALFORMED
    assert counted(api, "read", "unary") == {"client_error": 1}


def received(*pieces: bytes) -> Any:
    """Receives a body in these pieces."""
    messages = iter([{"type": "http.request", "body": each, "more_body": bool(each)} for each in (*pieces, b"")])

    async def receive() -> Any:
        return next(messages)

    return receive


async def test_a_disconnect_within_the_body_is_499() -> None:
    receive = AsyncMock(return_value={"type": "http.disconnect"})
    with pytest.raises(ClientClosedRequest, match="while it was sending the body"):
        await read_body(exchange_with(receive=receive), Limits(1024))


async def test_a_large_body_is_kept_outside_the_heap() -> None:
    receive = received(*(bytes([index % 256]) * 10_007 for index in range(300)))
    limits = Limits(8 * 1024 * 1024)
    exchange = exchange_with(receive=receive, budget=ByteBudget(limits.max_bytes_in_flight))
    tracemalloc.start()
    body = await read_body(exchange, limits)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(body) / 8
    assert bytes(body) == b"".join(bytes([index % 256]) * 10_007 for index in range(300))


class CountingMemory:
    """Implements :class:`app.core.inference.TensorMemory`."""

    def __init__(self) -> None:
        self.taken: list[memoryview] = []

    def take(self, size: int, tensor_at: int) -> memoryview:
        assert tensor_at == ELEMENT
        self.taken.append(memoryview(bytearray(size)))
        return self.taken[-1]

    def give_back(self, memory: memoryview) -> None:
        self.taken.remove(memory)


@pytest.mark.parametrize(
    ("transport", "headers", "count"),
    [
        ("unary", {"content-length": str(len(PNG) + 100_000)}, 1),
        ("unary", {"transfer-encoding": "chunked"}, 0),
        ("stream", {"content-length": str(len(PNG) + 100_000)}, 0),
    ],
)
async def test_a_raw_body_is_received_into_tensor_memory(
    api: Served, transport: str, headers: dict[str, str], count: int
) -> None:
    memory = CountingMemory()
    of_file, receive = [("content-type", "image/png"), *headers.items()], received(PNG, b"x" * 100_000)
    exchange = exchange_with(of_file, receive=receive, budget=ByteBudget(1024 * 1024, memory))
    exchange.record.transport = transport
    pipeline = api.gateway.inference.catalog.pipeline("read")
    request = await read_inference(exchange, pipeline, Limits(1024 * 1024), Deadline.after(PATIENCE_S))
    assert len(memory.taken) == count
    element = request.inputs[0].array.flat[0]
    assert bytes(element) == PNG + b"x" * 100_000
    for place in memory.taken:
        assert np.shares_memory(np.frombuffer(element, np.uint8), np.frombuffer(place, np.uint8))
    exchange.close()
    assert memory.taken == []


tight = scripted_fixture(limits=Limits(64 * 1024, max_bytes_in_flight=100_000))


async def test_a_body_over_the_budget_is_429_until_one_ends(tight: Served) -> None:
    may_end = asyncio.Event()

    async def slow() -> Any:
        yield PNG + b"\0" * 60_000
        await may_end.wait()

    large = sent(PNG + b"\0" * 60_000, "image/png")
    first = asyncio.create_task(tight.client.post(URL, **sent(slow(), "image/png")))
    await asyncio.sleep(0.05)
    refused = await tight.client.post(URL, **large)
    assert refusal(refused) == (429, "too_many_requests")
    assert refused.headers["retry-after"] == "1"
    assert (await tight.client.post(URL, **sent(PNG, "image/png"))).status_code == 200
    may_end.set()
    assert (await first).status_code == 200
    for content, media_type in ((b"\0", "image/png"), (b" ", "application/json"), (b" ", f"{FORM}x")):
        answer = await tight.client.post(URL, **sent(content * 60_000, media_type))
        assert answer.status_code == (422 if media_type == "image/png" else 400)
    assert (await tight.client.post(URL, **large)).status_code == 200


async def test_a_cancelled_request_releases_its_bytes(tight: Served) -> None:
    async def endless() -> Any:
        yield b"\0" * 60_000
        await asyncio.Event().wait()

    for _ in range(4):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tight.client.post(URL, **sent(endless(), "image/png")), 0.05)
    assert (await tight.client.post(URL, **sent(PNG + b"\0" * 60_000, "image/png"))).status_code == 200


@pytest.mark.parametrize(
    ("media_type", "is_parsed"),
    [("application/json", True), ("multipart/form-data; boundary=x", True), ("image/png", False)],
)
async def test_a_large_body_is_not_parsed_on_the_event_loop(
    roomy: Served, monkeypatch: pytest.MonkeyPatch, media_type: str, is_parsed: bool
) -> None:
    """A raw body needs no thread: it is neither parsed nor copied."""
    threads = []
    request_of = Pipeline.request_of

    def recorded(self: Pipeline, values: Any) -> Any:
        threads.append(threading.current_thread())
        return request_of(self, values)

    monkeypatch.setattr(Pipeline, "request_of", recorded)
    file = PNG + b"\0" * 70_000
    content = {"a": b'{"image": "%s"}' % base64.b64encode(file), "m": part(b'name="image"', file)}.get(
        media_type[0], file
    )
    assert (await roomy.client.post(URL, **sent(content, media_type))).status_code == 200
    assert (threads[0] is not threading.main_thread()) is is_parsed
    assert not is_parsed or sys.getswitchinterval() == pytest.approx(SWITCH_S)


KIB = 1024
LIMITED = """
pipelines:
  usual: &usual
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: true
    openai: {completions: {}}
  large: {<<: *usual, model: large, limits: {body_bytes: 131072}}
  small: {<<: *usual, model: small, limits: {body_bytes: 1024}}
  huge:
    model: reader
    inputs: {note: {tensor: NOTE, kind: text}, image: {tensor: IMAGE, kind: text}}
    limits: {body_bytes: 67108864}
"""
LIMITS = Limits(64 * KIB, max_bytes_in_flight=300 * KIB)
WRITERS = [replace(WRITER, name=name) for name in ("writer", "large", "small")]
ADDRESSES = ("/v1/pipelines/{}", "/v1/pipelines/{}/stream", "/v1/streams", "/v1/completions")
limited = gateway_fixture(LIMITED, *WRITERS, READER, answers=[word(b"Hi", 1), FINAL], limits=LIMITS)


def body_of(address: str, pipeline: str, size: int) -> bytes:
    """A body of ``size`` bytes."""
    fields: dict[str, Any] = {"prompt": ""}
    if address == "/v1/streams":
        fields = {"pipeline": pipeline, "inputs": fields}
    elif address == "/v1/completions":
        fields |= {"model": pipeline, "stream": True}
    body = json.dumps(fields)
    return body.replace('"prompt": "', '"prompt": "' + "x" * (size - len(body))).encode()


async def send(api: Served, address: str, pipeline: str, size: int, *, chunked: bool = False) -> httpx.Response:
    body = body_of(address, pipeline, size)
    assert len(body) == size

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, size, 8 * KIB):
            yield body[start : start + 8 * KIB]

    content = parts() if chunked else body
    return await api.client.post(address.format(pipeline), **sent(content, "application/json"))


def text_of(answer: httpx.Response) -> str:
    """The detail and the hint of an error, in the form of its dialect."""
    found = answer.json()
    return str(found["error"]["message"]) if "error" in found else f"{found['detail']} {found['hint']}"


OWN = "An operator can raise `limits.body_bytes` of the pipeline."
GLOBAL = "An operator can raise GATEWAY_MAX_BODY_BYTES."


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize(
    ("pipeline", "limit", "hint"), [("large", 128 * KIB, OWN), ("usual", 64 * KIB, GLOBAL), ("small", 1024, OWN)]
)
async def test_a_pipeline_has_its_own_limit_or_that_of_the_gateway(
    limited: Served, pipeline: str, limit: int, hint: str, *, address: str, chunked: bool
) -> None:
    answer = await send(limited, address, pipeline, limit + 1, chunked=chunked)
    assert answer.status_code == 413
    is_cut_off = chunked and ("{}" in address or pipeline == "large")  # otherwise another pipeline may accept it
    start = "The body has" if is_cut_off else f"The body has {limit + 1} bytes,"
    assert text_of(answer) == f"{start} more than the limit of {limit} bytes. {hint}"
    assert limited.engine.requests == []
    assert (await send(limited, address, pipeline, limit, chunked=chunked)).status_code in (200, 201)
    assert (await limited.client.get(f"/v1/pipelines/{pipeline}")).json()["limits"]["body_bytes"] == limit


async def test_the_limit_of_all_bodies_is_never_exceeded(limited: Served) -> None:
    answer = await limited.client.post("/v1/pipelines/huge", json={"image": "x", "note": "x" * 300 * KIB})
    assert answer.status_code == 413
    assert answer.json()["hint"] == "An operator can raise GATEWAY_MAX_BYTES_IN_FLIGHT."
    assert (await limited.client.get("/v1/pipelines/huge")).json()["limits"]["body_bytes"] == 300 * KIB


async def test_a_key_gets_no_limit_of_a_pipeline_that_it_does_not_allow() -> None:
    keys = [entry("narrow", pipelines=["usual", "small"])]
    engine = FakeEngine.of(*WRITERS, READER, answers=[FINAL])
    async with served(engine, LIMITED, limits=LIMITS, keys=keys) as api:
        body = sent(body_of("/v1/completions", "large", 100 * KIB), "application/json", **bearer("narrow"))
        answer = await api.client.post("/v1/completions", **body)
    assert (answer.status_code, text_of(answer).rpartition(". ")[2]) == (413, GLOBAL)
