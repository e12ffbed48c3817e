"""Steps of pipelines on the real Triton: the reference pipelines, and steps that fail, hang or write what they want."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.sessions import kill_triton
from tests.toolkit.connections import Connection, post
from tests.toolkit.events import read_stream
from tests.toolkit.processes import GatewayProcess, linked_models, live_gateway, live_triton
from tests.toolkit.waiting import eventually

PROMPT = {"prompt": "The for statement", "max_tokens": 24, "temperature": 0}


def test_a_stream_of_steps_is_that_of_the_ensemble(client: httpx.Client) -> None:
    ensemble, steps = (client.post(f"/v1/pipelines/{name}", json=PROMPT).json() for name in ("write", "write_steps"))
    assert steps == ensemble
    events = read_stream(client, "write_steps", PROMPT)
    assert "".join(each.data["text"] or "" for each in events[:-1]) == ensemble["text"]
    assert [each.data["token_id"] for each in events[:-1]] == [[token] for token in ensemble["token_id"]]


def test_openais_dialect_counts_the_tokens_of_steps(client: httpx.Client) -> None:
    body = {"prompt": "The for statement", "max_tokens": 8, "temperature": 0}
    answers = [client.post("/v1/completions", json={"model": name, **body}).json() for name in ("write", "write_steps")]
    assert answers[1]["usage"] == answers[0]["usage"]
    assert answers[1]["choices"] == answers[0]["choices"]


async def test_callers_that_leave_free_all_places_of_the_generator(gateway: GatewayProcess) -> None:
    """It writes eight texts at a time; each of these would take 50 s."""
    body = {"prompt": "A list is", "max_tokens": 512, "pause_ms": 100, "seed": 1}
    connections = [await Connection.to(gateway) for _ in range(8)]
    for each in connections:
        each.writer.write(post("/v1/pipelines/write_steps/stream", body))
    for each in connections:
        await each.reader.readuntil(b"id: 2\n")
        each.writer.transport.abort()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        answer = await client.post("/v1/pipelines/write_steps", json=PROMPT)
    assert answer.status_code == 200


def test_the_models_of_an_ensemble_show_the_condition_of_their_step(own_gateway: GatewayProcess) -> None:
    steps = httpx.get(f"{own_gateway.url}/v1/pipelines/with_ensemble").json()["graph"]["steps"]
    inner = {"ensemble": "scripted_chain", "part_of": "whole", "when": {"not_empty": "first.NUMBERS"}}
    assert [(each["name"], {key: each.get(key) for key in inner}) for each in steps] == [
        ("first", dict.fromkeys(inner)),
        ("scripted#2", inner),
        ("scripted_tail", inner),
    ]


SCRIPTS: dict[str, Any] = {
    "first": {"tensor": "FIRST", "kind": "text"},
    "second": {"tensor": "SECOND", "kind": "text"},
}
STEPS = {
    "first": {"model": "scripted", "inputs": {"SCRIPT": "FIRST"}},
    "stop": {"when": {"empty": "first.NUMBERS"}, "exit": "nothing_to_do"},
    "second": {"model": "scripted", "inputs": {"SCRIPT": "SECOND"}, "after": ["stop"]},
}
OUTPUTS = {
    "text": {"tensor": "second.TEXT", "kind": "text"},
    "numbers": {"tensor": "first.NUMBERS"},
    "more": {"tensor": "second.NUMBERS"},
}
PIPELINES = {
    "chain": {"inputs": SCRIPTS, "steps": STEPS, "outputs": OUTPUTS, "rejects_input": ["scripted"]},
    "tolerant": {
        "inputs": SCRIPTS,
        "steps": STEPS | {"second": STEPS["second"] | {"optional": True, "timeout_s": 1}},
        "outputs": OUTPUTS,
    },
}
PIPELINES["with_ensemble"] = {
    "inputs": SCRIPTS,
    "steps": {
        "first": STEPS["first"],
        "whole": {"model": "scripted_chain", "inputs": {"SCRIPT": "SECOND"}, "when": {"not_empty": "first.NUMBERS"}},
    },
    "outputs": {"text": {"tensor": "whole.TEXT", "kind": "text"}},
    "rejects_input": ["scripted_chain"],
}
PIPELINES["ruled"] = {
    **PIPELINES["chain"],
    "early_exit": [{"reason": "refused", "error": {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[refused]"}}],
}
own_triton = live_triton(
    lambda folder: linked_models(folder, ("scripted", "scripted_chain", "scripted_tail")), restarts=True
)
own_gateway = live_gateway(PIPELINES, "own_triton", drain_s="1")


def scripts(**given: Any) -> dict[str, str]:
    return {"first": json.dumps(given.get("first", {})), "second": json.dumps(given.get("second", {}))}


REFUSED = {"error": {"code": "INVALID_ARG", "message": "not this one"}}
FAULTS = [
    ({"first": REFUSED}, 422, "invalid_input", "Model 'scripted' refused the input. It reads 'first'."),
    ({"second": REFUSED}, 422, "invalid_input", "Model 'scripted' refused the input. It reads 'second'."),
    ({"second": {"raise": "no luck"}}, 502, "model_error", "Step 'second': "),
    ({"second": {"sleep_s": 30}}, 504, "deadline_exceeded", "Step 'second': "),
    ({"first": {"numbers": [1, 2, 3, 4], "shape": [2, 2]}}, 502, "contract_violation", "Step 'first': "),
    ({"second": {"omit": ["TEXT"]}}, 502, "contract_violation", "'second.TEXT' was not written"),
]


@pytest.mark.parametrize(("given", "status", "code", "detail"), FAULTS)
def test_a_faulty_step_is_named(
    own_gateway: GatewayProcess, given: dict[str, Any], status: int, code: str, detail: str
) -> None:
    with httpx.Client(base_url=own_gateway.url, timeout=20) as client:
        headers = {"X-Request-Timeout": "1"} if status == 504 else {}
        answer = client.post("/v1/pipelines/chain", json=scripts(**given), headers=headers)
        assert answer.status_code == status, answer.text
        if status != 200:
            assert answer.json()["code"] == code
            assert detail in answer.json()["detail"]
        assert client.post("/v1/pipelines/chain", json=scripts()).json()["text"] == "hello"


def test_an_ensemble_as_a_step_may_refuse_the_input(own_gateway: GatewayProcess) -> None:
    answer = httpx.post(f"{own_gateway.url}/v1/pipelines/with_ensemble", json=scripts(second=REFUSED), timeout=20)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"] == "Model 'scripted_chain' refused the input. It reads 'second'."


@pytest.mark.parametrize("step", ["first", "second"])
def test_an_error_of_a_step_can_be_an_early_exit(own_gateway: GatewayProcess, step: str) -> None:
    error = {"error": {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[refused]"}}
    answer = httpx.post(f"{own_gateway.url}/v1/pipelines/ruled", json=scripts(**{step: error}), timeout=20)
    assert (answer.status_code, answer.json()["early_exit"]) == (200, "refused"), answer.text


@pytest.mark.parametrize("second", [{"raise": "no luck"}, {"sleep_s": 5}])
def test_an_optional_step_that_fails_is_skipped(own_gateway: GatewayProcess, second: dict[str, Any]) -> None:
    answer = httpx.post(f"{own_gateway.url}/v1/pipelines/tolerant", json=scripts(second=second), timeout=20)
    assert answer.json() == {
        "text": None,
        "numbers": [1, 2],
        "more": [],
        "skipped": ["second"],
        "early_exit": None,
    }
    assert own_gateway.metric("steps_total", pipeline="tolerant", step="second", outcome="failed") >= 1


async def test_256_callers_of_a_chain_over_one_model_do_not_lock_it(own_gateway: GatewayProcess) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=own_gateway.url, timeout=60, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/v1/pipelines/chain", json=scripts()) for _ in range(256)))
        assert {each.status_code for each in answers} <= {200, 429}
        assert sum(each.status_code == 200 for each in answers) >= 64
        assert (await client.post("/v1/pipelines/chain", json=scripts())).status_code == 200
    eventually(lambda: own_gateway.metric("requests_running") == 0)


async def test_a_triton_that_is_killed_in_a_step_is_an_error_and_the_next_request_works(
    own_gateway: GatewayProcess, own_triton: EmbeddedTriton
) -> None:
    async with httpx.AsyncClient(base_url=own_gateway.url, timeout=30) as client:
        task = asyncio.create_task(client.post("/v1/pipelines/chain", json=scripts(second={"sleep_s": 20})))
        await asyncio.sleep(1)
        kill_triton(own_triton)
        assert (await task).status_code in (502, 503)

        def works() -> bool:
            return httpx.post(f"{own_gateway.url}/v1/pipelines/chain", json=scripts(), timeout=20).status_code == 200

        await asyncio.to_thread(eventually, works, 60)
