"""The micro-benchmarks compare applications that do the same work."""

import json

import pytest

from benchmarks.micro import cases, peers, small_request
from benchmarks.micro.cpu import cpu_of
from benchmarks.micro.exchange import request
from benchmarks.micro.gateway import served
from benchmarks.micro.run import table

APPLICATIONS = {
    "FastAPI with pydantic": peers.fastapi_with_pydantic(),
    "FastAPI with orjson": peers.fastapi_with_orjson(),
    "Starlette": peers.starlette(),
    "bare ASGI": peers.bare_asgi,
}


@pytest.mark.parametrize("name", APPLICATIONS)
async def test_every_application_gives_the_answer_of_the_gateway(name: str) -> None:
    async with served() as gateway:
        expected = await request(gateway.app, peers.PATH, small_request.BODY)
        answer = await request(APPLICATIONS[name], peers.PATH, small_request.BODY)
    assert expected.status == answer.status == 200
    assert json.loads(answer.answer) == json.loads(expected.answer) == {"OUTPUT": [1.5, 2.5, 3.5, 4.5]}


async def test_every_case_runs() -> None:
    async with served() as gateway:
        for case in (*cases.requests(gateway).values(), *cases.parts(gateway).values()):
            await case(1)


async def test_every_measured_case_has_a_row() -> None:
    async with served() as gateway:
        parts = cases.parts(gateway)
        name = "request_of_json"
        found = await cpu_of({name: parts[name]}, rounds=1)
    assert f"| {name} |" in str(table("Title", found))
