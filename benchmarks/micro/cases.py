"""Name -> a case: one small request through whole applications, and the parts of the gateway's requests."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import numpy as np
import orjson
from starlette.types import ASGIApp

from app.core.json import json_in_turns
from app.observability.record import RequestRecord, request_id_of
from benchmarks.micro import peers, small_request
from benchmarks.micro.cpu import Case
from benchmarks.micro.exchange import request
from benchmarks.micro.gateway import Served

LARGE = 150_528
"""The number of values in an image of 224 by 224 pixels."""


def requests(served: Served) -> Mapping[str, Case]:
    """One small POST through whole applications."""
    apps: dict[str, ASGIApp] = {
        "this gateway, everything on": served.app,
        "plain FastAPI, pydantic body": peers.fastapi_with_pydantic(),
        "FastAPI, bare Request and orjson": peers.fastapi_with_orjson(),
        "Starlette route and orjson": peers.starlette(),
        "bare ASGI and orjson": peers.bare_asgi,
    }
    return {name: _case(partial(_small_post, app)) for name, app in apps.items()}


def parts(served: Served) -> Mapping[str, Case]:
    """The parts of the gateway's work for one request of four floats, and the parts that depend on the body size."""
    large = np.random.default_rng(7).random(LARGE, np.float32)
    large_body = orjson.dumps({"INPUT": large}, option=orjson.OPT_SERIALIZE_NUMPY)
    return {
        **{name: _case_of(part) for name, part in small_request.parts().items()},
        "record, metrics and log line": _case(partial(_record, served)),
        f"request_of_json, {LARGE:,} floats": _case(partial(_read, served, large_body)),
        f"the answer, {LARGE:,} floats": _case(partial(_answer, large)),
    }


def _case(call: Callable[[], Awaitable[None]]) -> Case:
    async def case(count: int) -> None:
        for _ in range(count):
            await call()

    return case


def _case_of(part: small_request.Part) -> Case:
    async def case(count: int) -> None:
        part(count)

    return case


async def _small_post(app: ASGIApp) -> None:
    exchange = await request(app, peers.PATH, small_request.BODY)
    assert exchange.status == 200


async def _read(served: Served, body: bytes) -> None:
    served.pipeline.request_of_json(body)


async def _record(served: Served) -> None:
    record = RequestRecord(request_id_of(None), "POST", peers.PATH)
    record.pipeline, record.transport, record.status = served.pipeline.name, "unary", 200
    record.close(served.metrics)


async def _answer(values: np.ndarray) -> None:
    await json_in_turns({"OUTPUT": values})
