"""The first response that violates the contract ends the request, for example a list of tokens that grows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.events import read_stream
from tests.toolkit.executions import settled_executions
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.waiting import eventually

GROWING = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
CONTRACTS: dict[str, dict[str, Any]] = {
    "at_most_four": {"max_items": 4},
    "of_shape_one": {"shape": [1]},
    "not_growing": {"not_growing": True},
    "by_parameter": {"max_items": "chunk_tokens"},
}
VIOLATIONS = {
    "at_most_four": (3, "Output 'TOKEN_ID' has shape [8]; the contract allows at most 4 items."),
    "of_shape_one": (1, "Output 'TOKEN_ID' has shape [2]; the contract requires [1]."),
    "not_growing": (
        1,
        "Output 'TOKEN_ID' has shape [2]; the first response had 1 items, and no later response may have more.",
    ),
    "by_parameter": (2, "Output 'TOKEN_ID' has shape [4]; the contract allows at most 3 items."),
}
"""By pipeline: the number of outputs before the first violation, and the detail of the error."""


def pipelines(reference: dict[str, Any]) -> dict[str, Any]:
    """Returns a scripted generator with each contract, alone and in ensembles, and ``write`` with two contracts."""
    scripted = {
        "inputs": {"script": {"tensor": "SCRIPT", "kind": "text"}},
        "outputs": {"text": {"tensor": "TEXT", "kind": "text"}, "token_id": {"tensor": "TOKEN_ID"}},
        "parameters": {"chunk_tokens": {"type": "integer", "minimum": 1, "maximum": 64, "default": 3}},
        "stream": {"commit_s": 0.3},
        "timeout_s": 20,
    }
    by_contract = {
        name: {**scripted, "model": "scripted_stream", "contract": {"TOKEN_ID": spec}}
        for name, spec in CONTRACTS.items()
    }
    nested = {**scripted, "model": "stream_nested", "contract": {"TOKEN_ID": {"not_growing": True}}}
    write = {key: value for key, value in reference["write"].items() if key != "sample"}
    write_one = write | {"contract": {"TOKEN_ID": {"max_items": 1}}}
    return by_contract | {
        "nested": nested,
        "write": write,
        "write_one": write_one,
    }


@pytest.fixture(scope="module")
def contracts(
    triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("contracts")
    reference = yaml.safe_load((pytestconfig.rootpath / "gateway.yaml").read_text())["pipelines"]
    (folder / "pipelines.yaml").write_text(json.dumps({"pipelines": pipelines(reference)}))
    with running_gateway(folder, triton_url=triton.grpc_url, config=str(folder / "pipelines.yaml")) as process:
        yield process


@pytest.fixture(scope="module")
def client(contracts: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=contracts.url, timeout=30) as session:
        yield session


def growing(**fields: Any) -> dict[str, str]:
    return {"script": json.dumps({"outputs": len(GROWING), "items": GROWING, "interval_s": 0.02, **fields})}


def violations(contracts: GatewayProcess, pipeline: str, tensor: str = "TOKEN_ID") -> tuple[float, float]:
    """Returns the violations of the tensor, and the requests with the outcome ``contract_violation``."""
    return (
        contracts.metric("contract_violations_total", pipeline=pipeline, tensor=tensor),
        contracts.metric("requests_total", pipeline=pipeline, outcome="contract_violation"),
    )


@pytest.mark.parametrize("pipeline", CONTRACTS)
class TestGrowingTokens:
    def test_a_stream_ends_at_the_first_violation(
        self, client: httpx.Client, contracts: GatewayProcess, tmp_path: Path, pipeline: str
    ) -> None:
        before, notice = violations(contracts, pipeline), tmp_path / "notice"
        *written, last = read_stream(client, pipeline, growing(notice=str(notice), interval_s=0.1))
        outputs, detail = VIOLATIONS[pipeline]
        assert [len(event.data["token_id"]) for event in written] == GROWING[:outputs]
        assert (last.name, last.data["code"], last.data["detail"]) == ("error", "contract_violation", detail)
        assert ("It must send only items that are new" in last.data.get("hint", "")) is (pipeline != "of_shape_one")
        assert violations(contracts, pipeline) == (before[0] + 1, before[1] + 1)
        eventually(lambda: notice.exists() and bool(notice.read_text()))
        assert int(notice.read_text().split()[1]) < len(GROWING)


def test_a_violation_also_stops_the_generator(client: httpx.Client, triton: EmbeddedTriton) -> None:
    body = {"prompt": "The for statement", "max_tokens": 512, "seed": 7, "chunk_tokens": 2}
    _, whole = answer_and_steps(client, triton, "/v1/pipelines/write", body)
    for path in ("/v1/pipelines/write_one", "/v1/pipelines/write_one/stream"):
        answer, steps = answer_and_steps(client, triton, path, body)
        assert (answer.status_code, answer.json()["code"]) == (502, "contract_violation"), path
        detail = "Output 'TOKEN_ID' has shape [2]; the contract allows at most 1 items."
        assert answer.json()["detail"] == detail, path
        assert 1 <= steps < whole / 2, path


def answer_and_steps(
    client: httpx.Client, triton: EmbeddedTriton, path: str, body: dict[str, Any]
) -> tuple[httpx.Response, int]:
    """Returns the answer, and the number of executions of the detokenizer until Triton is idle."""
    before = settled_executions(triton, "text_detokenize")
    answer = client.post(path, json=body)
    return answer, settled_executions(triton, "text_detokenize") - before
