"""The limit of a body: the gateway's, and a pipeline's own under every address of the pipeline."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.api.bodies import Limits
from tests.api.conftest import FINAL, READER, WRITER, word
from tests.pipelines.test_presets import VLLM
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.keys import bearer, entry

KIB = 1024
JSON = {"Content-Type": "application/json"}
CONFIG = """
pipelines:
  usual:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: true
    openai: {completions: {}}
  large:
    model: large
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: true
    openai: {completions: {}}
    limits: {body_bytes: 131072}
  small:
    model: small
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: true
    openai: {completions: {}}
    limits: {body_bytes: 1024}
  huge:
    model: reader
    inputs: {note: {tensor: NOTE, kind: text}, image: {tensor: IMAGE, kind: text}}
    limits: {body_bytes: 67108864}
"""
LIMITS = Limits(64 * KIB, max_bytes_in_flight=300 * KIB)
WRITERS = [replace(WRITER, name=name) for name in ("writer", "large", "small")]
ADDRESSES = ("/v1/pipelines/{}", "/v1/pipelines/{}/stream", "/v1/streams", "/v1/completions")


api = gateway_fixture(CONFIG, *WRITERS, READER, answers=[word(b"Hi", 1), FINAL], limits=LIMITS)


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
    return await api.client.post(address.format(pipeline), content=content, headers=JSON)


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
    api: Served, pipeline: str, limit: int, hint: str, *, address: str, chunked: bool
) -> None:
    answer = await send(api, address, pipeline, limit + 1, chunked=chunked)
    assert answer.status_code == 413
    is_cut_off = chunked and ("{}" in address or pipeline == "large")  # otherwise another pipeline may accept it
    start = "The body has" if is_cut_off else f"The body has {limit + 1} bytes,"
    assert text_of(answer) == f"{start} more than the limit of {limit} bytes. {hint}"
    assert api.engine.requests == []
    assert (await send(api, address, pipeline, limit, chunked=chunked)).status_code in (200, 201)


async def test_the_limit_of_all_bodies_is_never_exceeded(api: Served) -> None:
    answer = await api.client.post("/v1/pipelines/huge", json={"image": "x", "note": "x" * 300 * KIB})
    assert answer.status_code == 413
    assert answer.json()["hint"] == "An operator can raise GATEWAY_MAX_BYTES_IN_FLIGHT."


async def test_a_key_gets_no_limit_of_a_pipeline_that_it_does_not_allow() -> None:
    keys = [entry("narrow", pipelines=["usual", "small"])]
    engine = FakeEngine.of(*WRITERS, READER, answers=[FINAL])
    async with served(engine, CONFIG, limits=LIMITS, keys=keys) as api:
        body, headers = body_of("/v1/completions", "large", 100 * KIB), bearer("narrow")
        answer = await api.client.post("/v1/completions", content=body, headers={**headers, **JSON})
    assert (answer.status_code, text_of(answer).rpartition(". ")[2]) == (413, GLOBAL)


@pytest.mark.parametrize(("name", "size"), [("usual", 64 * KIB), ("large", 128 * KIB), ("huge", 300 * KIB)])
async def test_the_description_of_a_pipeline_has_its_limit(api: Served, name: str, size: int) -> None:
    assert (await api.client.get(f"/v1/pipelines/{name}")).json()["limits"]["body_bytes"] == size


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({"model": "model"}, 64 * 2**20),
        ({"model": "text"}, 64 * KIB),
        ({"model": "model", "limits": {"queue": 3}}, 64 * 2**20),
        ({"model": "model", "limits": {"body_bytes": 9}}, 9),
    ],
)
async def test_vllm_with_images_accepts_64_mib(keys: dict[str, Any], size: int) -> None:
    text_only = replace(VLLM, name="text", inputs=tuple(each for each in VLLM.inputs if each.name != "image"))
    document = {"pipelines": {"llm": {"preset": "vllm", "warmup": False, **keys}}}
    limits = Limits(64 * KIB)
    async with served(FakeEngine.of(VLLM, text_only), json.dumps(document), limits=limits) as api:
        found = (await api.client.get("/v1/pipelines/llm")).json()["limits"]
    assert (found["body_bytes"], found["queue"]) == (size, keys.get("limits", {}).get("queue", 256))
