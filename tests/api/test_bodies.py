"""The ways a body can come, and what is refused before a pipeline sees it."""

import base64
from typing import Any

import httpx
import pytest

from app.domain.inference import InferenceResponse
from tests.api.conftest import PNG
from tests.fakes.gateway import Served

URL = "/v1/pipelines/read"
WRITE = "/v1/pipelines/write"


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    assert len(answer.content) <= 4096
    return answer.status_code, answer.json()["code"]


def image_sent(api: Served) -> Any:
    return api.engine.requests[-1].inputs[0].array.tolist()


class TestWaysIn:
    @pytest.mark.parametrize(
        "media_type", ["application/json", "application/json; charset=utf-8", "application/x+json"]
    )
    async def test_json(self, api: Served, media_type: str) -> None:
        body = b'{"image": "%s"}' % base64.b64encode(PNG)
        answer = await api.client.post(URL, content=body, headers={"Content-Type": media_type})
        assert answer.json() == {"text": "hi", "scores": [0.5, None], "early_exit": None}
        assert image_sent(api) == [PNG]

    async def test_a_form_with_a_file_and_fields(self, api: Served) -> None:
        answer = await api.client.post(URL, files={"image": PNG}, data={"note": "ü", "n": "5"})
        assert answer.status_code == 200
        assert [tensor.array.tolist() for tensor in api.engine.requests[0].inputs] == [[PNG], ["ü".encode()]]
        assert api.engine.requests[0].parameters == {"n": 5}

    async def test_a_large_file_in_a_form_touches_no_disk(self, api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.TemporaryFile", None)
        api.gateway.limits = type(api.gateway.limits)(8 * 1024 * 1024)
        content = PNG + b"\0" * 2 * 1024 * 1024
        assert (await api.client.post(URL, files={"image": content})).status_code == 200
        assert image_sent(api) == [content]

    @pytest.mark.parametrize("media_type", ["image/png", "application/octet-stream", "IMAGE/PNG"])
    async def test_the_raw_body_with_parameters_in_the_query(self, api: Served, media_type: str) -> None:
        answer = await api.client.post(
            URL, content=PNG, headers={"Content-Type": media_type}, params={"n": "7", "image": "ignored"}
        )
        assert answer.status_code == 200
        assert image_sent(api) == [PNG]
        assert api.engine.requests[0].parameters == {"n": 7}


class TestRefusals:
    @pytest.mark.parametrize(
        "media_type", ["", "text/plain", "application/x-www-form-urlencoded", "application", "a/b/c", ";", "\xff"]
    )
    async def test_another_content_type(self, api: Served, media_type: str) -> None:
        answer = await api.client.post(URL, content=b"{}", headers={b"Content-Type": media_type.encode("latin-1")})
        assert refusal(answer) == (415, "unsupported_media_type")
        assert "-H 'Content-Type: application/json'" in answer.json()["hint"]

    async def test_raw_bytes_for_a_pipeline_that_takes_no_file(self, api: Served) -> None:
        answer = await api.client.post(WRITE, content=PNG, headers={"Content-Type": "image/png"})
        assert refusal(answer) == (415, "unsupported_media_type")

    @pytest.mark.parametrize("declared", [True, False])
    async def test_a_body_too_large_declared_or_not(self, api: Served, declared: bool) -> None:
        async def chunks() -> Any:
            for _ in range(65):
                yield b"x" * 1024

        content = b"x" * 65 * 1024 if declared else chunks()
        answer = await api.client.post(URL, content=content, headers={"Content-Type": "application/json"})
        assert refusal(answer) == (413, "payload_too_large")

    async def test_a_length_that_lies_is_believed_only_where_it_refuses(self, api: Served) -> None:
        headers = {"Content-Type": "application/json", "Content-Length": "9" * 400}
        assert refusal(await api.client.post(URL, content=b"{}", headers=headers)) == (413, "payload_too_large")

    @pytest.mark.parametrize(
        ("media_type", "body"),
        [
            ("multipart/form-data", b"x"),
            ("multipart/form-data; boundary=", b"x"),
            ("multipart/form-data; boundary=x", b"garbage"),
            ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--\r\n"),
            ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\nbroken'),
            (
                "multipart/form-data; boundary=x; charset=undefined",
                b'--x\r\nContent-Disposition: form-data; name="note"\r\n\r\na\r\n--x--\r\n',
            ),
        ],
    )
    async def test_a_broken_form(self, api: Served, media_type: str, body: bytes) -> None:
        answer = await api.client.post(URL, content=body, headers={"Content-Type": media_type})
        assert refusal(answer) in {(400, "invalid_request"), (422, "invalid_input")}

    async def test_half_a_surrogate_pair_by_an_old_charset(self, api: Served) -> None:
        body = b'--x\r\nContent-Disposition: form-data; name="note"\r\n\r\n+2AA-\r\n--x--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=x; charset=utf-7"}
        assert refusal(await api.client.post(URL, content=body, headers=headers)) == (422, "invalid_input")

    async def test_ten_thousand_parts(self, api: Served) -> None:
        api.gateway.limits = type(api.gateway.limits)(8 * 1024 * 1024)
        answer = await api.client.post(URL, files={f"f{index}": b"" for index in range(10_000)})
        assert refusal(answer) == (400, "invalid_request")

    async def test_what_is_no_image(self, api: Served) -> None:
        assert refusal(await api.client.post(URL, files={"image": b"%PDF"})) == (422, "invalid_input")

    async def test_after_all_that_the_next_request_works(self, api: Served) -> None:
        await api.client.post(URL, content=b"[" * 60_000, headers={"Content-Type": "application/json"})
        assert (await api.client.post(URL, files={"image": PNG})).status_code == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body(api: Served) -> None:
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
    }
    await api.app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert api.engine.requests == []
