"""Images in the messages of chats: what each kind of model gets, what is refused, and images by their addresses."""

import base64
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.api.bodies import Limits
from app.api.downloads import ImageDownloads
from app.config.mismatch import PipelineMismatch
from tests.api.openai.conftest import chunks, refusal, step
from tests.llm.test_template import QWEN_VL, TEXT
from tests.pipelines.test_presets import CONFIGS
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.http_server import GIF, HUGE_PNG, PNG, ImageHost, answer, image_host
from tests.toolkit.models import model, pipeline, response, tensor

CONFIG = f"""
pipelines:
  vllm: &vllm
    model: vllm
    preset: vllm
    warmup: false
    openai: {{chat: &chat {{template_text: "{TEXT}", image_marker: "<image>", max_images: 3}}}}
  api: {{<<: *vllm, model: api, preset: tensorrt_llm_api}}
  tools: {{<<: *vllm, openai: {{tools: hermes, chat: *chat}}}}
  texts: {{<<: *vllm, openai: {{chat: {{template_text: "{TEXT}"}}}}}}
  many: {{<<: *vllm, openai: {{chat: {{<<: *chat, max_images: 4}}}}}}
  small: {{<<: *vllm, limits: {{body_bytes: 100000}}}}
  bytes:
    model: captions
    inputs: {{prompt: {{tensor: PROMPT, kind: text}}, picture: {{tensor: PICTURE, kind: image}}}}
    outputs: {{text: {{tensor: TEXT, kind: text}}}}
    openai: {{chat: *chat}}
  list:
    model: albums
    inputs: {{prompt: {{tensor: PROMPT, kind: text}}, pictures: {{tensor: PICTURES, kind: image}}}}
    outputs: {{text: {{tensor: TEXT, kind: text}}}}
    openai: {{chat: *chat}}
"""
CAPTIONS = model(["PROMPT BYTES [1]", "PICTURE BYTES [1]"], "TEXT BYTES [1]", name="captions")
ALBUMS = model(["PROMPT BYTES [1]", "PICTURES BYTES [-1]"], "TEXT BYTES [1]", name="albums")
MODELS = [replace(CONFIGS["vllm"], name="vllm"), replace(CONFIGS["tensorrt_llm_api"], name="api"), CAPTIONS, ALBUMS]
SAID = [step(b"A cat", reason=b"stop", is_final=True)]


api = gateway_fixture(CONFIG, *MODELS, answers=SAID)


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def chat(api: Served, *messages: dict[str, Any], model: str = "vllm", **body: Any) -> httpx.Response:
    return await api.client.post("/v1/chat/completions", json={"model": model, "messages": messages, **body})


def sent(api: Served, index: int = -1) -> dict[str, Any]:
    return {each.name: each.array.reshape(-1).tolist() for each in api.engine.requests[index].inputs}


TWO = user(text("Compare "), image(data_url(PNG), detail="low"), text(" and "), image(data_url(GIF, "image/gif")))


async def test_vllm_gets_base64_and_a_marker_for_each_image_of_each_choice(api: Served) -> None:
    answered = await chat(api, {"role": "system", "content": "Be brief."}, TWO, n=2)
    assert [each["message"]["content"] for each in answered.json()["choices"]] == ["A cat", "A cat"]
    for index in range(2):
        assert sent(api, index)["image"] == [base64.b64encode(PNG), base64.b64encode(GIF)]
        assert sent(api, index)["text_input"] == [b"<system>Be brief.<user>Compare <image> and <image>"]


async def test_a_model_of_one_image_gets_its_bytes(api: Served) -> None:
    api.engine.answers = [response(tensor("TEXT", "BYTES", [b"A cat"]), is_final=True)]
    assert (await chat(api, user(image(data_url(PNG))), model="bytes")).status_code == 200
    assert sent(api)["PICTURE"] == [PNG]


async def test_images_may_stand_beside_messages_of_tools(api: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answered = await chat(
        api,
        user(text("What is there?")),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a picture"},
        user(image(data_url(PNG)), text("This one.")),
        model="tools",
    )
    assert answered.status_code == 200
    assert sent(api)["text_input"] == [b"<user>What is there?<assistant><tool>a picture<user><image>This one."]
    assert sent(api)["image"] == [base64.b64encode(PNG)]


HI = {"role": "user", "content": "Hi"}


async def test_a_chat_without_images(api: Served) -> None:
    """A required list of images may be empty, or a field of its own."""
    assert (await chat(api, {"role": "user", "content": "Write <image>"})).status_code == 200
    assert "image" not in sent(api)
    assert refusal(await chat(api, HI, model="bytes"))[2] == "picture"
    api.engine.answers = [response(tensor("TEXT", "BYTES", [b"Nothing"]), is_final=True)]
    for more, pictures in (({}, []), ({"pictures": [base64.b64encode(PNG).decode()]}, [PNG])):
        assert (await chat(api, HI, model="list", **more)).status_code == 200
        assert sent(api)["PICTURES"] == pictures


async def test_an_image_is_not_decoded(api: Served) -> None:
    """A few bytes can claim to be an image of 100 million pixels."""
    assert (await chat(api, user(image(data_url(HUGE_PNG))))).status_code == 200
    assert sent(api)["image"] == [base64.b64encode(HUGE_PNG)]


FIRST, URL = "messages[0].content[0]", "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("messages", "name", "param", "words"),
    [
        ([user(text("a")), user(image(data_url(PNG)))], "texts", "messages[1].content[0]", "takes only texts"),
        ([user(image(data_url(PNG)))], "texts", FIRST, "image_marker"),
        ([{"role": "system", "content": [image(data_url(PNG))]}], "vllm", FIRST, "only a message of the role user"),
        ([user(*[image(data_url(PNG))] * 4)], "vllm", "messages[0].content[3]", "a request may have 3"),
        ([user(*[image(data_url(PNG))] * 2)], "bytes", "messages[0].content[1]", "a request may have 1"),
        (
            [user(text("a"), image("https://example.com/a.png"))],
            "vllm",
            "messages[0].content[1].image_url.url",
            "does not download addresses",
        ),
        ([user(image("HTTP://example.com/a.png"))], "vllm", URL, "not download"),
        ([user(image("a.png"))], "vllm", URL, "must be a data: URL"),
        ([user(image("data:image/png,abc"))], "vllm", URL, "without base64"),
        ([user(image("data:image/png;base64,%%"))], "vllm", URL, "not base64"),
        ([user(image(data_url(b"text")))], "vllm", URL, "not an image"),
        ([user(image(data_url(PNG, "text/html")))], "vllm", URL, "media type"),
        ([user(image(data_url(PNG), detail="x"))], "vllm", f"{FIRST}.image_url.detail", "allowed values"),
        ([user({"type": "input_audio"})], "vllm", f"{FIRST}.type", "allowed values"),
        ([user({"type": "image_url"})], "vllm", FIRST, "must have the field 'image_url'"),
        ([user(text("<image>"), image(data_url(PNG)))], "vllm", "messages", "marker of an image"),
    ],
)
async def test_what_cannot_be_is_refused_at_its_place(
    api: Served, messages: Sequence[dict[str, Any]], name: str, param: str, words: str
) -> None:
    answered = await chat(api, *messages, model=name)
    assert refusal(answered) == (400, "invalid_input", param)
    assert words in answered.json()["error"]["message"]
    assert api.engine.requests == []


async def test_the_field_of_the_images_is_not_allowed_beside_them(api: Served) -> None:
    answered = await chat(api, user(image(data_url(PNG))), images=[data_url(GIF)])
    assert refusal(answered) == (400, "invalid_input", "images")


async def test_the_schema_has_images_only_where_the_model_takes_them(api: Served) -> None:
    document = (await api.client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schemas = {each["title"]: each for each in body["content"]["application/json"]["schema"]["oneOf"]}
    has_images = {name: "image_url" in str(schema["properties"]["messages"]) for name, schema in schemas.items()}
    assert has_images == dict.fromkeys(["vllm", "api", "tools", "many", "small", "bytes", "list"], True) | {
        "texts": False
    }
    assert "picture" not in schemas["bytes"]["required"]


SEVERAL = ["FIRST BYTES [1] optional", "SECOND BYTES [-1] optional"]


class TestStart:
    """What a template takes is known when the pipeline is compiled."""

    def chat(self, *inputs: str, **keys: Any) -> Any:
        config = model(["PROMPT BYTES [1]", *inputs], "TEXT BYTES [1]")
        kinds = {each.split(" ")[0].lower(): each for each in inputs}
        images = {
            name: {"tensor": name.upper(), "kind": "image", "optional": "optional" in each}
            for name, each in kinds.items()
        }
        return pipeline(
            config,
            inputs={"prompt": {"tensor": "PROMPT", "kind": "text"}, **images},
            outputs={"text": {"tensor": "TEXT", "kind": "text"}},
            openai={"chat": {"template_text": TEXT, **keys}},
        ).openai.chat.images

    @pytest.mark.parametrize(
        ("inputs", "keys", "problem", "key"),
        [
            (["PICTURE BYTES [1]"], {}, "no place for the images of 'picture'", "image_marker"),
            (["PICTURE BYTES [1] optional"], {"images": "picture"}, "no place for the images", "image_marker"),
            (SEVERAL, {"image_marker": "<image>"}, "not exactly one input", "images"),
            (["PICTURE BYTES [-1]"], {"images": "prompt"}, "'prompt' is not an image or a list of images", "images"),
            (["PICTURE BYTES [2,2]"], {"images": "picture"}, "is not an image or a list of images", "images"),
        ],
    )
    def test_images_without_a_place_or_an_input_are_a_mismatch(
        self, inputs: Sequence[str], keys: Any, problem: str, key: str
    ) -> None:
        with pytest.raises(PipelineMismatch, match=problem) as caught:
            self.chat(*inputs, **keys)
        assert caught.value.location == ("openai", "chat", key)

    def test_a_model_that_may_have_images_need_not_have_them_in_chats(self) -> None:
        assert self.chat("PICTURE BYTES [1] optional") is None
        found = self.chat(*SEVERAL, image_marker="<image>", images="second", max_images=5)
        assert (found.input, found.most, found.is_single) == ("second", 5, False)

    @pytest.mark.parametrize(("dims", "most"), [("[1]", 1), ("[-1]", 16), ("[4]", 4)])
    def test_the_dims_limit_the_number(self, dims: str, most: int) -> None:
        assert self.chat(f"PICTURE BYTES {dims}", template_text=QWEN_VL).most == most


class TestDownloads:
    """From a server on loopback, which only tests can allow."""

    @pytest.fixture
    async def host(self) -> AsyncIterator[ImageHost]:
        answers = {
            "/a.png": answer(),
            "/b.gif": answer(GIF, content_type="image/gif"),
            "/page": answer(b"<html>", content_type="text/html"),
            "/allowed": answer(PNG + bytes(100_000 - len(PNG))),
            "/large": answer(PNG + bytes(200_000)),
        }
        async with image_host(answers) as found:
            yield found

    @pytest.fixture
    async def api(self, host: ImageHost) -> AsyncIterator[Served]:
        async with self._gateway(host) as found:
            yield found

    def _gateway(self, host: ImageHost, **more: Any) -> AbstractAsyncContextManager[Served]:
        downloads = ImageDownloads([f"http://localhost:{host.port}"], may_connect=lambda _ip: True)
        return served(FakeEngine.of(*MODELS, answers=SAID), CONFIG, downloads=downloads, **more)

    def _image(self, host: ImageHost, path: str) -> dict[str, Any]:
        return image(f"http://localhost:{host.port}{path}")

    async def test_images_keep_their_order(self, api: Served, host: ImageHost) -> None:
        """An address that is given twice is downloaded once. Data URLs may stand beside addresses."""
        paths = ("/b.gif", "/a.png", "/b.gif")
        messages = [user(image(data_url(PNG))), user(*(self._image(host, path) for path in paths))]
        assert chunks(await chat(api, *messages, model="many", stream=True))[-1] == "[DONE]"
        assert sent(api)["image"] == [base64.b64encode(each) for each in (PNG, GIF, PNG, GIF)]
        assert len(host.requests) == 2

    async def test_a_refused_download_is_the_callers_error(self, api: Served, host: ImageHost) -> None:
        """Other hosts are refused before any download."""
        other = image("https://evil.example/a.png")
        for second, requests in ((other, 0), (self._image(host, "/page"), 2)):
            answered = await chat(api, user(self._image(host, "/a.png"), second))
            assert refusal(answered) == (400, "invalid_input", "messages[0].content[1].image_url.url")
            assert len(host.requests) == requests
        assert api.engine.requests == []

    @pytest.mark.parametrize("path", ["/large", "/endless"])
    async def test_the_images_of_a_request_have_the_limit_of_its_body(
        self, api: Served, host: ImageHost, path: str
    ) -> None:
        answered = await chat(api, user(self._image(host, "/a.png"), self._image(host, path)), model="small")
        assert refusal(answered)[2] == "messages[0].content[1].image_url.url"
        assert "may have 100000 bytes" in answered.json()["error"]["message"]

    async def test_downloads_count_as_bytes_in_flight(self, host: ImageHost) -> None:
        async with self._gateway(host, limits=Limits(64 * 1024, 100_020)) as api:
            refused = await chat(api, user(self._image(host, "/allowed")), model="small")
            assert refusal(refused)[:2] == (429, "too_many_requests")
            assert (await chat(api, user(self._image(host, "/a.png")), model="small")).status_code == 200

    async def test_a_download_counts_in_the_deadline(self, api: Served, host: ImageHost) -> None:
        started = time.monotonic()
        answered = await api.client.post(
            "/v1/chat/completions",
            json={"model": "vllm", "messages": [user(self._image(host, "/slow"))]},
            headers={"X-Request-Timeout": "0.3"},
        )
        assert refusal(answered)[:2] == (504, "deadline_exceeded")
        assert time.monotonic() - started < 5
