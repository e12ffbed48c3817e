"""Images in the messages of chats: what each kind of model gets, what is refused, and images by their addresses."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.bodies import Limits
from app.api.downloads import ImageDownloads
from app.pipelines.mismatch import PipelineMismatch
from tests.api.openai.conftest import chunks, refusal, step
from tests.llm.test_template import QWEN_VL, TEXT
from tests.pipelines.test_presets import CONFIGS
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served
from tests.toolkit.image_host import GIF, HUGE_PNG, PNG, ImageHost, answer, image_host
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


@asynccontextmanager
async def gateway(tmp_path: Path, **more: Any) -> AsyncIterator[Served]:
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    given: dict[str, Any] = {"limits": Limits(64 * 1024), **more}
    async with served(FakeEngine.of(*MODELS, answers=SAID), tmp_path / "gateway.yaml", **given) as found:
        yield found


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    async with gateway(tmp_path) as found:
        yield found


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


def sent(api: Served) -> dict[str, Any]:
    return {each.name: each.array.reshape(-1).tolist() for each in api.engine.requests[-1].inputs}


TWO = user(text("Compare "), image(data_url(PNG), detail="low"), text(" and "), image(data_url(GIF, "image/gif")))


async def test_vllm_gets_base64_and_a_marker_for_each_image(api: Served) -> None:
    answered = await chat(api, {"role": "system", "content": "Be brief."}, TWO)
    assert answered.json()["choices"][0]["message"]["content"] == "A cat"
    assert sent(api)["image"] == [base64.b64encode(PNG), base64.b64encode(GIF)]
    assert sent(api)["text_input"] == [b"<system>Be brief.<user>Compare <image> and <image>"]


async def test_the_llm_api_gets_data_urls_with_their_own_media_type(api: Served) -> None:
    api.engine.answers = [response(tensor("text_output", "BYTES", [b"A cat"]), is_final=True)]
    messages = [user(image(data_url(GIF, "application/octet-stream")), image(data_url(PNG)))]
    assert (await chat(api, *messages, model="api")).status_code == 200
    assert sent(api)["image_url"] == [data_url(GIF, "image/gif").encode(), data_url(PNG).encode()]
    assert sent(api)["text_input"] == [b"<user><image><image>"]


async def test_another_model_gets_the_bytes(api: Served) -> None:
    api.engine.answers = [response(tensor("TEXT", "BYTES", [b"A cat"]), is_final=True)]
    assert (await chat(api, user(image(data_url(PNG))), model="bytes")).status_code == 200
    assert sent(api)["PICTURE"] == [PNG]


async def test_each_choice_gets_the_images(api: Served) -> None:
    assert (await chat(api, TWO, n=2)).status_code == 200
    assert [len(each.inputs) for each in api.engine.requests] == [len(api.engine.requests[0].inputs)] * 2
    assert len(sent(api)["image"]) == 2


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


async def test_texts_need_no_image(api: Served) -> None:
    assert (await chat(api, {"role": "user", "content": "Write <image>"})).status_code == 200
    assert "image" not in sent(api)
    assert refusal(await chat(api, {"role": "user", "content": "Hi"}, model="bytes"))[2] == "picture"


async def test_a_required_list_of_images_may_be_empty(api: Served) -> None:
    api.engine.answers = [response(tensor("TEXT", "BYTES", [b"Nothing"]), is_final=True)]
    assert (await chat(api, {"role": "user", "content": "Hi"}, model="list")).status_code == 200
    assert sent(api)["PICTURES"] == []
    body = {"model": "list", "messages": [{"role": "user", "content": "Hi"}]}
    answered = await api.client.post(
        "/v1/chat/completions", json={**body, "pictures": [base64.b64encode(PNG).decode()]}
    )
    assert answered.status_code == 200
    assert sent(api)["PICTURES"] == [PNG]


async def test_an_image_is_not_decoded(api: Served) -> None:
    """A few bytes can claim to be an image of 100 million pixels."""
    assert (await chat(api, user(image(data_url(HUGE_PNG))))).status_code == 200
    assert sent(api)["image"] == [base64.b64encode(HUGE_PNG)]


@pytest.mark.parametrize(
    ("messages", "name", "param", "words"),
    [
        ([user(text("a")), user(image(data_url(PNG)))], "texts", "messages[1].content[0]", "takes only texts"),
        (
            [{"role": "system", "content": [image(data_url(PNG))]}],
            "vllm",
            "messages[0].content[0]",
            "only a message of the role user",
        ),
        ([user(*[image(data_url(PNG))] * 4)], "vllm", "messages[0].content[3]", "a request may have 3"),
        ([user(*[image(data_url(PNG))] * 2)], "bytes", "messages[0].content[1]", "a request may have 1"),
        (
            [user(text("a"), image("https://example.com/a.png"))],
            "vllm",
            "messages[0].content[1].image_url.url",
            "does not download addresses",
        ),
        ([user(image("HTTP://example.com/a.png"))], "vllm", "messages[0].content[0].image_url.url", "not download"),
        ([user(image("a.png"))], "vllm", "messages[0].content[0].image_url.url", "must be a data: URL"),
        ([user(image("data:image/png,abc"))], "vllm", "messages[0].content[0].image_url.url", "without base64"),
        ([user(image("data:image/png;base64,%%"))], "vllm", "messages[0].content[0].image_url.url", "not base64"),
        ([user(image(data_url(b"text")))], "vllm", "messages[0].content[0].image_url.url", "not an image"),
        ([user(image(data_url(PNG, "text/html")))], "vllm", "messages[0].content[0].image_url.url", "media type"),
        ([user(image(data_url(PNG), detail="x"))], "vllm", "messages[0].content[0].image_url.detail", "allowed values"),
        ([user({"type": "input_audio"})], "vllm", "messages[0].content[0].type", "allowed values"),
        ([user({"type": "image_url"})], "vllm", "messages[0].content[0]", "must have the field 'image_url'"),
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


async def test_a_refusal_of_every_image_tells_the_operator_what_is_needed(api: Served) -> None:
    answered = await chat(api, user(image(data_url(PNG))), model="texts")
    assert "image_marker" in answered.json()["error"]["message"]


async def test_the_field_of_the_images_is_not_allowed_beside_them(api: Served) -> None:
    answered = await chat(api, user(image(data_url(PNG))), images=[data_url(GIF)])
    assert refusal(answered) == (400, "invalid_input", "images")


async def test_the_schema_has_images_only_where_the_model_takes_them(api: Served) -> None:
    document = (await api.client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schemas = {each["title"]: each for each in body["content"]["application/json"]["schema"]["oneOf"]}
    has_images = {name: "image_url" in str(schema["properties"]["messages"]) for name, schema in schemas.items()}
    assert has_images == dict.fromkeys(["vllm", "api", "tools", "small", "bytes", "list"], True) | {"texts": False}
    assert "picture" not in schemas["bytes"]["required"]


class TestStart:
    """What a template takes is known when the pipeline is compiled."""

    def chat(self, *inputs: str, **keys: Any) -> Any:
        config = model(["PROMPT BYTES [1]", *inputs], "TEXT BYTES [1]")
        kinds = {each.split(" ")[0].lower(): each for each in inputs}
        images = {
            name: {"tensor": name.upper(), "kind": "image", "optional": "optional" in each}
            for name, each in kinds.items()
        }
        compiled = pipeline(
            config,
            inputs={"prompt": {"tensor": "PROMPT", "kind": "text"}, **images},
            outputs={"text": {"tensor": "TEXT", "kind": "text"}},
            openai={"chat": {"template_text": TEXT, **keys}},
        )
        assert compiled.openai is not None
        assert compiled.openai.chat is not None
        return compiled.openai.chat.images

    def test_a_model_that_needs_an_image_needs_a_place_for_it(self) -> None:
        with pytest.raises(PipelineMismatch, match="no place for the images of 'picture'") as caught:
            self.chat("PICTURE BYTES [1]")
        assert caught.value.location == ("openai", "chat", "image_marker")

    def test_a_model_that_may_have_images_need_not_have_them_in_chats(self) -> None:
        assert self.chat("PICTURE BYTES [1] optional") is None
        with pytest.raises(PipelineMismatch, match="no place for the images"):
            self.chat("PICTURE BYTES [1] optional", images="picture")

    def test_the_input_is_named_if_there_are_several(self) -> None:
        inputs = ("FIRST BYTES [1] optional", "SECOND BYTES [-1] optional")
        with pytest.raises(PipelineMismatch, match="not exactly one input") as caught:
            self.chat(*inputs, image_marker="<image>")
        assert caught.value.location == ("openai", "chat", "images")
        found = self.chat(*inputs, image_marker="<image>", images="second", max_images=5)
        assert (found.input, found.most, found.is_single) == ("second", 5, False)

    def test_another_input_is_refused(self) -> None:
        with pytest.raises(PipelineMismatch, match="'prompt' is not an image or a list of images"):
            self.chat("PICTURE BYTES [-1]", images="prompt")
        with pytest.raises(PipelineMismatch, match="is not an image or a list of images"):
            self.chat("PICTURE BYTES [2,2]", images="picture")

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
    async def api(self, tmp_path: Path, host: ImageHost) -> AsyncIterator[Served]:
        downloads = self._downloads(host, lambda _ip: True)
        async with gateway(tmp_path, downloads=downloads) as found:
            yield found

    def _downloads(self, host: ImageHost, may_connect: Any) -> ImageDownloads:
        return ImageDownloads([f"http://localhost:{host.port}"], may_connect=may_connect)

    def _image(self, host: ImageHost, path: str) -> dict[str, Any]:
        return image(f"http://localhost:{host.port}{path}")

    async def test_images_keep_their_order(self, api: Served, host: ImageHost) -> None:
        paths = ("/b.gif", "/a.png", "/b.gif")
        answered = await chat(api, user(*(self._image(host, path) for path in paths)))
        assert answered.status_code == 200
        assert sent(api)["image"] == [base64.b64encode(each) for each in (GIF, PNG, GIF)]
        assert len(host.requests) == 2

    async def test_addresses_and_data_urls_may_be_mixed(self, api: Served, host: ImageHost) -> None:
        messages = [user(image(data_url(GIF, "image/gif"))), user(self._image(host, "/a.png"))]
        assert chunks(await chat(api, *messages, stream=True))[-1] == "[DONE]"
        assert sent(api)["image"] == [base64.b64encode(each) for each in (GIF, PNG)]

    async def test_a_failed_download_is_the_callers_error(self, api: Served, host: ImageHost) -> None:
        answered = await chat(api, user(self._image(host, "/a.png"), self._image(host, "/page")))
        assert refusal(answered) == (400, "invalid_input", "messages[0].content[1].image_url.url")
        assert api.engine.requests == []

    async def test_other_hosts_are_refused_before_any_download(self, api: Served, host: ImageHost) -> None:
        answered = await chat(api, user(self._image(host, "/a.png"), image("https://evil.example/a.png")))
        assert refusal(answered)[2] == "messages[0].content[1].image_url.url"
        assert host.requests == []

    @pytest.mark.parametrize("path", ["/large", "/endless"])
    async def test_the_images_of_a_request_have_the_limit_of_its_body(
        self, api: Served, host: ImageHost, path: str
    ) -> None:
        answered = await chat(api, user(self._image(host, "/a.png"), self._image(host, path)), model="small")
        assert refusal(answered)[2] == "messages[0].content[1].image_url.url"
        assert "may have 100000 bytes" in answered.json()["error"]["message"]

    async def test_downloads_count_as_bytes_in_flight(self, tmp_path: Path, host: ImageHost) -> None:
        downloads = self._downloads(host, lambda _ip: True)
        async with gateway(tmp_path, downloads=downloads, limits=Limits(64 * 1024, 100_020)) as api:
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

    async def test_a_client_that_leaves_ends_the_download(self, api: Served, host: ImageHost) -> None:
        request = asyncio.create_task(chat(api, user(self._image(host, "/slow"))))
        while not host.requests:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.wait([request])
        assert api.engine.requests == []
