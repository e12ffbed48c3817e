"""Inference requests bypass FastAPI and use the same routes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.body_memory import ByteBudget
from app.api.dialect import Services, ShortPath
from app.api.exchange import EntryPoint
from app.api.pipelines.routes import PipelineRoutes
from app.lint.findings import Finding
from tests.api.conftest import READ, counted
from tests.toolkit.exchange import connected, exchange_with
from tests.toolkit.gateway import Served

IMAGE = {"image": "iVBORw0KGgo="}


class NoFastAPI(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the request reached FastAPI")


@asynccontextmanager
async def client_of(api: Served, app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    inference = api.gateway.inference
    entry = EntryPoint(app, inference.metrics, inference.workload, inference.tracer, ByteBudget(2**20))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(connected(entry)), base_url="http://gateway") as client:
        yield client


def application(api: Served, kind: type[FastAPI]) -> FastAPI:
    app = kind(redirect_slashes=False)
    gateway = api.gateway
    routes = PipelineRoutes(Services(gateway.inference, gateway.limits, gateway.store, gateway.statistics, no_findings))
    app.router.routes.extend(routes.short_routes())
    return app


async def no_findings() -> Sequence[Finding]:
    return ()


@pytest.mark.parametrize("path", ["read", "r%65ad", "nothing", "read/stream"])
async def test_inference_never_reaches_fastapi(api: Served, path: str) -> None:
    app = application(api, NoFastAPI)
    async with client_of(api, ShortPath(app)) as client:
        answer = await client.post(f"/v1/pipelines/{path}", json=IMAGE)
    assert answer.status_code == {"nothing": 404, "read/stream": 400}.get(path, 200)
    assert answer.headers["x-request-id"]
    assert answer.headers["server-timing"].startswith("gateway;dur=")


@pytest.mark.parametrize("path", ["/v1/pipelines/read/", "/v1/pipelines/a/b/stream", "/v1/pipelines//stream", "/v1"])
async def test_other_addresses_are_passed_to_fastapi(api: Served, path: str) -> None:
    app = application(api, FastAPI)
    async with client_of(api, ShortPath(app)) as client:
        assert (await client.post(path, json=IMAGE)).status_code == 404


async def test_fastapi_gives_the_same_answer(api: Served) -> None:
    api.engine.answers = [READ, READ]
    app = application(api, FastAPI)
    async with client_of(api, app) as ordinary, client_of(api, ShortPath(app)) as short:
        answers = [await client.post("/v1/pipelines/read", json=IMAGE) for client in (ordinary, short)]
    assert answers[0].status_code == 200
    assert answers[0].content == answers[1].content
    assert counted(api, "read", "unary") == {"ok": 2}


async def test_samples_use_the_scheme_of_a_trusted_proxy(api: Served) -> None:
    answer = await api.client.get("/v1/pipelines/read", headers={"X-Forwarded-Proto": "https"})
    assert "https://gateway/v1/pipelines/read" in answer.json()["samples"]["curl"]


async def test_the_first_of_two_headers_with_one_name_is_used() -> None:
    exchange = exchange_with([("x-request-timeout", "1"), ("x-request-timeout", "2")])
    assert exchange.header(b"x-request-timeout") == "1"


async def test_held_bytes_are_released_when_the_exchange_ends() -> None:
    budget = ByteBudget(100)
    exchange = exchange_with(budget=budget)
    exchange.hold(60)
    assert budget.taken == 60
    exchange.close()
    assert budget.taken == 0
