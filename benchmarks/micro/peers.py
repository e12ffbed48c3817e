"""Minimal applications that answer the same small POST, to measure the cost of the frameworks."""

import orjson
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/v1/pipelines/identity"


class Floats(BaseModel):
    INPUT: list[float]


def fastapi_with_pydantic() -> ASGIApp:
    app = FastAPI()

    @app.post(PATH)
    async def identity(body: Floats) -> dict[str, list[float]]:
        return {"OUTPUT": body.INPUT}

    return app


def fastapi_with_orjson() -> ASGIApp:
    app = FastAPI()

    @app.post(PATH)
    async def identity(request: Request) -> Response:
        return _answer(await request.body())

    return app


def starlette() -> ASGIApp:
    async def identity(request: Request) -> Response:
        return _answer(await request.body())

    return Starlette(routes=[Route(PATH, identity, methods=["POST"])])


async def bare_asgi(_scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    text = orjson.dumps({"OUTPUT": orjson.loads(body)["INPUT"]})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _answer(body: bytes) -> Response:
    text = orjson.dumps({"OUTPUT": orjson.loads(body)["INPUT"]})
    return Response(text, media_type="application/json")
