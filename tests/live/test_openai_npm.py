"""The JavaScript client of OpenAI reads the same answers as the Python client."""

import json
import time
from pathlib import Path

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.live.test_openai_sdk import PROMPT, SAMPLING, pipeline_answer
from tests.toolkit.environments import npm_environment
from tests.toolkit.executions import executions
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.programs import output_of

pytestmark = pytest.mark.full


def test_the_javascript_client(
    gateway: GatewayProcess, client: httpx.Client, triton: EmbeddedTriton, require: Require
) -> None:
    folder = npm_environment("openai-client", Path(__file__).with_name("npm_openai"), require)
    answers = json.loads(output_of(["node", "call.mjs", gateway.url], folder))
    expected = pipeline_answer(client, "write", prompt=PROMPT, **SAMPLING)["text"]
    assert answers["models"] == ["write", "embed", "scripted_stream"]
    assert answers["completion"]["choices"][0]["text"] == answers["chunks"]["text"] == expected
    assert answers["chunks"]["usage"] == answers["completion"]["usage"]
    assert answers["chat"]["choices"][0]["message"]["content"] == answers["chatChunks"]["text"]
    assert answers["chat"]["usage"] == answers["chatChunks"]["usage"]
    vector = pipeline_answer(client, "embed", text="A cat.")["embedding"]
    assert [len(item["embedding"]) for item in answers["embeddings"]] == [384, 384]
    assert answers["embeddings"][0]["embedding"] == pytest.approx(vector, abs=1e-6)
    assert answers["badField"] == {"class": "BadRequestError", "status": 400, "code": "invalid_input", "param": "n"}
    assert answers["badModel"]["class"] == "NotFoundError"
    assert answers["midStream"] == {"class": "APIError", "status": None, "code": "model_error", "param": None}
    assert answers["chunksBeforeDisconnect"] == 5
    time.sleep(0.5)
    after = executions(triton, "text_detokenize")
    time.sleep(0.3)
    assert executions(triton, "text_detokenize") == after, "the generator continues after the client disconnected"
