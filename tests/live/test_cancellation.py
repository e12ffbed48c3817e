"""A disconnect cancels the request in Triton and releases all resources."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.connections import Connection
from tests.toolkit.executions import check_usually_below, settled_executions
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.raw_http import post
from tests.toolkit.waiting import eventually


async def leave_after(gateway: GatewayProcess, request: bytes, until: bytes = b"", pause_s: float = 0.0) -> float:
    """Sends a request, reads until ``until``, waits and disconnects. Returns the time."""
    connection = await Connection.to(gateway)
    try:
        connection.writer.write(request)
        if until:
            await connection.reader.readuntil(until)
        await asyncio.sleep(pause_s)
        return time.monotonic()
    finally:
        connection.writer.transport.abort()


@pytest.mark.parametrize(
    ("path", "fields", "until"),
    [
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 50, "interval_s": 0.05}, b"id: 3"),
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 1, "interval_s": 2.5}, b""),
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 1, "interval_s": 2.5}, b"200 OK"),
        ("/v1/pipelines/scripted_stream", {"outputs": 50, "interval_s": 0.05}, b""),
        ("/v1/pipelines/scripted", {"sleep_s": 4}, b""),
    ],
    ids=["after outputs", "before headers", "before the first output", "unary over a decoupled model", "unary"],
)
async def test_a_disconnect_cancels_the_request_of_the_model(
    gateway: GatewayProcess, tmp_path: Path, path: str, fields: dict[str, Any], until: bytes
) -> None:
    notice = tmp_path / "notice"
    request = post(path, {"script": json.dumps({**fields, "notice": str(notice)})})
    left = await leave_after(gateway, request, until, pause_s=0.1)
    await asyncio.to_thread(eventually, lambda: notice.exists() and bool(notice.read_text()))
    assert float(notice.read_text().split()[0]) >= left - 0.1


def test_the_cancel_hook_stops_a_step_inside_an_ensemble(gateway: GatewayProcess, triton: EmbeddedTriton) -> None:
    """Without the hook, Triton computes all 500 tokens. The bound is half of them."""
    check_usually_below(251, lambda: asyncio.run(_tokens_after_a_disconnect(gateway, triton)))


async def _tokens_after_a_disconnect(gateway: GatewayProcess, triton: EmbeddedTriton) -> float:
    """Returns how many tokens Triton computed that the gateway did not relay."""
    before = await asyncio.to_thread(settled_executions, triton, "text_detokenize")
    relayed_before = gateway.metric("stream_outputs_total", pipeline="write")
    body = {"prompt": "The for statement", "max_tokens": 500, "seed": 3, "temperature": 1.0}
    await leave_after(gateway, post("/v1/pipelines/write/stream", body), b"id: 5\n")
    await asyncio.to_thread(eventually, lambda: gateway.metric("active_streams") == 0)
    computed = await asyncio.to_thread(settled_executions, triton, "text_detokenize") - before
    assert computed >= 5
    return computed - (gateway.metric("stream_outputs_total", pipeline="write") - relayed_before)
