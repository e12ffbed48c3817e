"""The formats of a body, and the errors before a body reaches a pipeline."""

import asyncio
import base64
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.bodies import MAX_QUERY_FIELDS, SWITCH_S, Limits, read_body
from app.api.exchange import ByteBudget
from app.api.pipelines.pipeline_endpoints import read_inference
from app.core.inference import ELEMENT, Deadline, InferenceResponse
from app.pipelines.body import BodyReader
from app.pipelines.pipeline import Pipeline
from tests.api.conftest import PNG, counted, scripted
from tests.toolkit.exchange import FakeConnection, exchange_with
from tests.toolkit.gateway import Served
from tests.toolkit.waiting import PATIENCE_S

URL = "/v1/pipelines/read"
WRITE = "/v1/pipelines/write"


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    assert len(answer.content) <= 4096
    return answer.status_code, answer.json()["code"]


def image_sent(api: Served) -> Any:
    return api.engine.requests[-1].inputs[0].array.tolist()


class TestFormats:
    @pytest.mark.parametrize(
        "media_type", ["application/json", "application/json; charset=utf-8", "application/x+json"]
    )
    async def test_json_with_a_base64_image(self, api: Served, media_type: str) -> None:
        body = b'{"image": "%s"}' % base64.b64encode(PNG)
        answer = await api.client.post(URL, content=body, headers={"Content-Type": media_type})
        assert answer.json() == {"text": "hi", "scores": [0.5, None], "early_exit": None}
        assert image_sent(api) == [PNG]

    async def test_a_form_with_a_file_and_fields(self, api: Served) -> None:
        answer = await api.client.post(URL, files={"image": PNG}, data={"note": "ü", "n": "5"})
        assert answer.status_code == 200
        assert [tensor.array.tolist() for tensor in api.engine.requests[0].inputs] == [[PNG], ["ü".encode()]]
        assert api.engine.requests[0].parameters == {"n": 5}

    async def test_a_large_file_in_a_form_is_not_written_to_disk(
        self, roomy: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.TemporaryFile", None)
        content = PNG + b"\0" * 2 * 1024 * 1024
        assert (await roomy.client.post(URL, files={"image": content})).status_code == 200
        assert image_sent(roomy) == [content]

    @pytest.mark.parametrize("media_type", ["image/png", "application/octet-stream", "IMAGE/PNG"])
    async def test_a_raw_body_with_parameters_in_the_query(self, api: Served, media_type: str) -> None:
        answer = await api.client.post(URL, content=PNG, headers={"Content-Type": media_type}, params={"n": "7"})
        assert answer.status_code == 200
        assert image_sent(api) == [PNG]
        assert api.engine.requests[0].parameters == {"n": 7}

    @pytest.mark.parametrize("size", [1024, 2 * 1024 * 1024])
    async def test_files_are_not_decoded_as_json(
        self, roomy: Served, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr(BodyReader, "from_json", None)
        monkeypatch.setattr("app.pipelines.body._decoded", None)
        content = PNG + b"\xff" * size
        assert (await roomy.client.post(URL, files={"image": content})).status_code == 200
        assert image_sent(roomy) == [content]
        answer = await roomy.client.post(URL, content=content, headers={"Content-Type": "image/png"})
        assert answer.status_code == 200
        assert image_sent(roomy) == [content]


class TestRefusals:
    @pytest.mark.parametrize(
        "media_type", ["", "text/plain", "application/x-www-form-urlencoded", "application", "a/b/c", ";", "\xff"]
    )
    async def test_an_unsupported_content_type_is_415(self, api: Served, media_type: str) -> None:
        answer = await api.client.post(URL, content=b"{}", headers={b"Content-Type": media_type.encode("latin-1")})
        assert refusal(answer) == (415, "unsupported_media_type")
        assert "-H 'Content-Type: application/json'" in answer.json()["hint"]

    @pytest.mark.parametrize("declared", [True, False])
    async def test_a_body_above_the_limit_is_413(self, api: Served, declared: bool) -> None:
        async def chunks() -> Any:
            for _ in range(65):
                yield b"x" * 1024

        content = b"x" * 65 * 1024 if declared else chunks()
        answer = await api.client.post(URL, content=content, headers={"Content-Type": "application/json"})
        assert refusal(answer) == (413, "payload_too_large")

    async def test_a_declared_length_above_the_limit_is_413(self, api: Served) -> None:
        headers = {"Content-Type": "application/json", "Content-Length": "9" * 400}
        assert refusal(await api.client.post(URL, content=b"{}", headers=headers)) == (413, "payload_too_large")

    @pytest.mark.parametrize(
        ("parameter", "body"),
        [
            ("", b"x"),
            ("; boundary=", b"x"),
            ("; boundary=x", b"garbage"),
            ("; boundary=x", b"--x\r\n\r\nno name\r\n--x--\r\n"),
            ("; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\nbroken'),
            ("; boundary=x", b'--x\r\nContent-Disposition: form-data; name="note"\r\n\r\na\r\n'),
            ("; boundary=x", b'--xy\r\nContent-Disposition: form-data; name="n"\r\n\r\n1\r\n--x--'),
            ("; boundary=x", b'--x\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n\r\n--x--'),
            ("; boundary=x", b"--x\r\nA: b\r\n" + b"C: d\r\n" * 9000 + b"\r\n\r\n--x--"),
        ],
    )
    async def test_a_malformed_form_is_400_or_422(self, api: Served, parameter: str, body: bytes) -> None:
        answer = await api.client.post(URL, content=body, headers={"Content-Type": f"multipart/form-data{parameter}"})
        assert refusal(answer) in {(400, "invalid_request"), (422, "invalid_input")}

    @pytest.mark.parametrize(("length", "status"), [(70, 200), (71, 400)])
    async def test_the_boundary_of_a_form_has_at_most_70_characters(
        self, api: Served, length: int, status: int
    ) -> None:
        headers = {"Content-Type": f"multipart/form-data; boundary={'x' * length}"}
        answer = await api.client.post(URL, files={"image": PNG}, headers=headers)
        assert answer.status_code == status

    @pytest.mark.parametrize("charset", ["utf-7", "utf-16", "undefined", "idna"])
    @pytest.mark.parametrize("field", ["note", "n", "+2AA-"])
    async def test_a_charset_other_than_utf_8_is_415(self, api: Served, charset: str, field: str) -> None:
        body = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n+2AA-\r\n--x--\r\n' % field.encode()
        headers = {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"}
        answer = await api.client.post(URL, content=body, headers=headers)
        assert refusal(answer) == (415, "unsupported_media_type")

    async def test_a_lone_surrogate_in_a_form_is_422(self, api: Served) -> None:
        body = b'--x\r\nContent-Disposition: form-data; name="note"\r\n\r\n\xed\xa0\x80\r\n--x--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await api.client.post(URL, content=body, headers=headers)
        assert refusal(answer) == (422, "invalid_input")
        assert {"field": "note", "problem": "is not UTF-8 text"} in answer.json()["errors"]

    async def test_the_error_names_a_part_given_twice(self, api: Served) -> None:
        answer = await api.client.post(URL, files=[("image", PNG), ("note", b"a"), ("note", b"b")])
        assert refusal(answer) == (422, "invalid_input")
        assert answer.json()["errors"] == [{"field": "note", "problem": "is given twice"}]

    @pytest.mark.parametrize("query", ["image=x", "n=1&n=2"])
    async def test_a_field_given_twice_in_a_query_is_422(self, api: Served, query: str) -> None:
        answer = await api.client.post(f"{URL}?{query}", content=PNG, headers={"Content-Type": "image/png"})
        assert refusal(answer) == (422, "invalid_input")
        assert [each["problem"] for each in answer.json()["errors"]] == ["is given twice"]

    async def test_too_many_query_fields_are_400_before_the_body_is_read(self, api: Served) -> None:
        async def never() -> Any:
            raise AssertionError
            yield b""

        query = "&".join(f"f{index}" for index in range(MAX_QUERY_FIELDS + 1))
        answer = await api.client.post(f"{URL}?{query}", content=never(), headers={"Content-Type": "image/png"})
        assert refusal(answer) == (400, "invalid_request")
        assert counted(api, "read", "unary") == {"client_error": 1}

    async def test_few_query_fields_are_parsed(self, api: Served) -> None:
        query = "&".join(f"f{index}" for index in range(MAX_QUERY_FIELDS))
        answer = await api.client.post(f"{URL}?{query}", content=PNG, headers={"Content-Type": "image/png"})
        assert refusal(answer) == (422, "invalid_input")

    @pytest.mark.parametrize(
        ("url", "body"),
        [(each, {"json": {"image": ""}}) for each in (URL, f"{WRITE}/stream", "/v1/streams")]
        + [(URL, {"files": {"image": PNG}})],
    )
    async def test_a_query_with_a_json_body_or_a_form_is_400(self, api: Served, url: str, body: Any) -> None:
        answer = await api.client.post(f"{url}?n=5", **body)
        assert refusal(answer) == (400, "invalid_request")
        assert "in the body" in answer.json()["hint"]

    @pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "x"])
    @pytest.mark.parametrize("url", [URL, "/v1/streams"])
    async def test_an_unsupported_encoding_is_415(self, api: Served, url: str, encoding: str) -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = await api.client.post(url, content=b"\x1f\x8b\x08", headers=headers)
        assert refusal(answer) == (415, "unsupported_media_type")
        assert "Content-Encoding" in answer.json()["detail"]

    async def test_identity_encoding_is_accepted(self, api: Served) -> None:
        headers = {"Content-Type": "image/png", "Content-Encoding": "identity"}
        assert (await api.client.post(URL, content=PNG, headers=headers)).status_code == 200

    async def test_a_data_url_of_another_media_type_is_422(self, api: Served) -> None:
        url = f"data:text/plain;base64,{base64.b64encode(PNG).decode()}"
        answer = await api.client.post(URL, json={"image": url})
        assert refusal(answer) == (422, "invalid_input")
        assert "media type" in answer.json()["errors"][0]["problem"]

    async def test_ten_thousand_parts_are_400(self, roomy: Served) -> None:
        answer = await roomy.client.post(URL, files={f"f{index}": b"" for index in range(10_000)})
        assert refusal(answer) == (400, "invalid_request")

    @pytest.mark.parametrize(
        "body",
        [
            b'{"prompt": [' + b'"",' * 2_000_000 + b'""]}',
            b"{" + b",".join(b'"key%d":1' % index for index in range(500_000)) + b"}",
            b"{" + b'"seed":"",' * 600_000 + b'"seed":""}',
        ],
        ids=["empty strings", "unknown keys", "repeated keys"],
    )
    async def test_a_large_invalid_body_gets_at_most_eight_errors(self, roomy: Served, body: bytes) -> None:
        answer = await roomy.client.post(WRITE, content=body, headers={"Content-Type": "application/json"})
        assert refusal(answer) == (422, "invalid_input")
        assert 1 <= len(answer.json()["errors"]) <= 8

    async def test_a_file_that_is_not_an_image_is_422(self, api: Served) -> None:
        assert refusal(await api.client.post(URL, files={"image": b"%PDF"})) == (422, "invalid_input")


async def test_a_disconnect_within_the_body_is_499(api: Served) -> None:
    api.engine.answers = [InferenceResponse({})]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": URL,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {"connection": FakeConnection(receive)},
    }
    await api.app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert api.engine.requests == []


async def test_a_large_body_is_kept_outside_the_heap() -> None:
    chunks = iter([bytes([index % 256]) * 10_007 for index in range(300)])

    async def receive() -> Any:
        chunk = next(chunks, b"")
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

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
    parts = iter([PNG, b"x" * 100_000])

    async def receive() -> Any:
        part = next(parts, b"")
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    memory = CountingMemory()
    sent = [("content-type", "image/png"), *headers.items()]
    exchange = exchange_with(sent, receive=receive, budget=ByteBudget(1024 * 1024, memory))
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


class TestBytesInFlight:
    """All bodies share one budget."""

    LIMITS = Limits(64 * 1024, max_bytes_in_flight=100_000)

    @pytest.fixture
    async def tight(self, tmp_path: Path) -> AsyncIterator[Served]:
        async with scripted(tmp_path, limits=self.LIMITS) as gateway:
            yield gateway

    async def test_a_body_over_the_budget_is_429_until_one_ends(self, tight: Served) -> None:
        may_end = asyncio.Event()

        async def slow() -> Any:
            yield PNG + b"\0" * 60_000
            await may_end.wait()

        headers = {"Content-Type": "image/png"}
        first = asyncio.create_task(tight.client.post(URL, content=slow(), headers=headers))
        await asyncio.sleep(0.05)
        refused = await tight.client.post(URL, content=PNG + b"\0" * 60_000, headers=headers)
        assert refusal(refused) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert (await tight.client.post(URL, content=PNG, headers=headers)).status_code == 200
        may_end.set()
        assert (await first).status_code == 200
        assert (await tight.client.post(URL, content=PNG + b"\0" * 60_000, headers=headers)).status_code == 200

    @pytest.mark.parametrize(
        ("content", "media_type", "status"),
        [
            (PNG + b"\0" * 60_000, "image/png", 200),
            (b"\0" * 60_000, "image/png", 422),
            (b" " * 60_000, "application/json", 400),
            (b" " * 60_000, "multipart/form-data; boundary=x", 400),
        ],
    )
    async def test_every_answer_releases_its_bytes(
        self, tight: Served, content: bytes, media_type: str, status: int
    ) -> None:
        for _ in range(4):
            answer = await tight.client.post(URL, content=content, headers={"Content-Type": media_type})
            assert answer.status_code == status

    async def test_a_cancelled_request_releases_its_bytes(self, tight: Served) -> None:
        async def endless() -> Any:
            yield b"\0" * 60_000
            await asyncio.Event().wait()

        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    tight.client.post(URL, content=endless(), headers={"Content-Type": "image/png"}), 0.05
                )
        content = PNG + b"\0" * 60_000
        assert (await tight.client.post(URL, content=content, headers={"Content-Type": "image/png"})).status_code == 200


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
    part = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n%s\r\n--x--'
    body = {"a": b'{"image": "%s"}' % base64.b64encode(PNG + b"\0" * 70_000), "m": part % (PNG + b"\0" * 70_000)}
    content = body.get(media_type[0], PNG + b"\0" * 70_000)
    assert (await roomy.client.post(URL, content=content, headers={"Content-Type": media_type})).status_code == 200
    assert (threads[0] is not threading.main_thread()) is is_parsed
    assert not is_parsed or sys.getswitchinterval() == pytest.approx(SWITCH_S)
