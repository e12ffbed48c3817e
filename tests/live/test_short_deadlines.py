"""Calls whose deadlines pass in the middle of a BLS script do not end Triton.

Triton 2.51 crashes if a deadline of its own passes at the moment of an answer, so the engine's deadlines end before
those of Triton.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.core.errors import GatewayError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.launcher.embedded_triton import EmbeddedTriton
from app.shared_memory.layout import LARGE_BYTES
from app.shared_memory.leases import SharedMemory
from app.triton.connect import MAX_MESSAGE_BYTES, open_transport, registry_of
from app.triton.triton_engine import TritonEngine
from tests.toolkit.processes import LIVE, live_triton

CLIENTS = 8
SHORTEST_S, LONGEST_S = 0.001, 0.1
MIB = 1024 * 1024
ENDS = {"DeadlineExceeded", "ModelError", "TooManyRequests", "ok"}
"""No call reports that Triton is gone."""


def link_models(repository: Path) -> None:
    for name in ("ocr_bls", "text_detect", "text_recognize"):
        (repository / name).symlink_to(LIVE.parents[1] / "triton_models" / name)


own_triton = live_triton(link_models)  # no other test uses it, and it is not restarted


@dataclass(frozen=True)
class Caller:
    """Calls ``ocr_bls``. ``padding``: bytes after the end of each image, so that it is large enough for its way."""

    engine: TritonEngine
    is_stream: bool
    padding: int

    async def answer(self, image: bytes, timeout_s: float) -> InferenceResponse:
        """Raises GatewayError."""
        tensor = Tensor("IMAGE", "BYTES", bytes_array([image + b"\0" * self.padding], (1, 1)))
        parameters = {"deadline_unix_ms": int((time.time() + timeout_s) * 1000)}
        request = InferenceRequest("ocr_bls", (tensor,), parameters=parameters)
        deadline = Deadline(time.monotonic() + timeout_s)
        if not self.is_stream:
            return await self.engine.infer(request, deadline)
        async with aclosing(self.engine.infer_stream(request, deadline)) as responses:
            return await anext(responses)


@pytest.fixture(params=["wire", "shared memory", "stream"])
async def caller(request: pytest.FixtureRequest, own_triton: EmbeddedTriton) -> AsyncIterator[Caller]:
    async with open_transport(own_triton.grpc_url) as transport:
        shared_memory = (
            SharedMemory(registry_of(transport), 256 * MIB, MAX_MESSAGE_BYTES)
            if request.param == "shared memory"
            else None
        )
        engine = TritonEngine(transport, shared_memory=shared_memory)
        cleaning = None
        if shared_memory is not None:
            shared_memory.learn(await engine.model_config("ocr_bls"), "")
            cleaning = asyncio.create_task(shared_memory.run())
        yield Caller(engine, request.param == "stream", 0 if shared_memory is None else LARGE_BYTES)
        await engine.close()
        if cleaning is not None:
            cleaning.cancel()


@pytest.fixture
def images(pytestconfig: pytest.Config) -> list[bytes]:
    """Images that need both models, one model, and none."""
    samples = [(pytestconfig.rootpath / "samples" / name).read_bytes() for name in ("sign.png", "blank.png")]
    return [*samples, b"no image"]


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_triton_survives_deadlines_of_1_to_100_ms(caller: Caller, images: list[bytes], count: int) -> None:
    ends, remaining = Counter[str](), iter(range(count))
    chance = random.Random(count)

    async def client() -> None:
        for _ in remaining:
            try:
                await caller.answer(chance.choice(images), chance.uniform(SHORTEST_S, LONGEST_S))
                ends["ok"] += 1
            except GatewayError as exc:
                ends[type(exc).__name__] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    answer = await caller.answer(images[0], 30.0)
    assert answer.outputs["TEXTS"].array.size
    assert ends.keys() <= ENDS, ends
    assert ends["DeadlineExceeded"] > count / 2
