"""``GATEWAY_LOG_TENSORS=shapes``: the gateway and the models log the tensors of a request under the same request id."""

import re
from pathlib import Path

import httpx
import pytest

from tests.live.conftest import GatewayProcess, running_gateway
from tests.live.some_models import embedded

MODELS = ("text_generate", "text_tokenize", "tokens_generate", "text_detokenize")
PROMPT = "four words nobody logs"


@pytest.fixture(scope="module")
def logging(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> GatewayProcess:
    """A gateway with its own Triton that has streamed ``write`` once and exited, so that its log is complete."""
    folder = tmp_path_factory.mktemp("logging")
    settings = embedded(folder, models_venv, MODELS, ["write"])
    with running_gateway(folder, **settings, log_tensors="shapes") as gateway:
        body = {"prompt": PROMPT, "max_tokens": 3, "seed": 1}
        url = f"{gateway.url}/v1/pipelines/write/stream"
        httpx.post(url, json=body, headers={"X-Request-ID": "streamed"}, timeout=30).raise_for_status()
    return gateway


@pytest.fixture
def triton_request_id(logging: GatewayProcess) -> str:
    """Returns the request id that the gateway sent to Triton for the streamed request."""
    return str(logging.log_lines("streamed")[0]["triton_request_id"])


def test_the_gateway_logs_a_line_for_each_response(logging: GatewayProcess, triton_request_id: str) -> None:
    seen = [
        line
        for line in logging.json_lines()
        if line.get("triton_request_id") == triton_request_id and "tensors" in line
    ]
    with_tensors = [line for line in seen if line["tensors"]]
    assert [line["response"] for line in seen] == list(range(1, len(seen) + 1))
    assert len(with_tensors) == 3
    assert with_tensors[0]["model"] == "text_generate"
    assert set(with_tensors[0]["tensors"].split()) >= {"TEXT:BYTES[1]", "TOKEN_ID:INT32[1]"}
    assert seen[-1]["final"] is True


def test_the_models_log_their_tensors(logging: GatewayProcess, triton_request_id: str) -> None:
    logged = re.findall(rf"tensors triton_request_id={triton_request_id} ([^\"\\]*)", logging.log)
    assert any(tensors.startswith("TOKEN_IDS:INT32[") for tensors in logged), "tokenizer"
    assert sum("TOKEN_ID:INT32[1]" in tensors and "TEXT" not in tensors for tensors in logged) == 3, (
        "not one line of the generator for each token"
    )
    assert sum("TEXT:BYTES[1]" in tensors for tensors in logged) == 3, "detokenizer"


def test_the_log_contains_no_values(logging: GatewayProcess) -> None:
    assert PROMPT not in logging.log
