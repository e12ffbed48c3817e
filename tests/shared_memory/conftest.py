import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app.shared_memory import regions
from app.shared_memory.leases import SharedMemory
from app.shared_memory.regions import SHARED_MEMORY
from app.triton.connect import MAX_MESSAGE_BYTES, open_transport, registry_of
from app.triton.triton_engine import TritonEngine
from tests.shared_memory.stage import CONFIG, FIXED, MIB, Observed, Stage, sum_of
from tests.toolkit.triton import FakeTriton, serving


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Returns the files of this test only, because other gateways on the machine use the same folder."""
    prefix = f"lane_test_{secrets.token_hex(8)}_"
    monkeypatch.setattr(regions, "PREFIX", prefix)
    return lambda: list(SHARED_MEMORY.glob(f"{prefix}*"))


@pytest.fixture
async def stage(own_files: Callable[[], list[Path]]) -> AsyncIterator[Stage]:
    observed = Observed()
    async with serving(FakeTriton()) as triton, open_transport(triton.url) as transport:
        triton.unary = sum_of(triton)
        shared_memory = SharedMemory(
            registry_of(transport), 4 * MIB, MAX_MESSAGE_BYTES, observed.called, observed.holds
        )
        for config in (CONFIG, FIXED):
            shared_memory.learn(config, "")
        running = asyncio.create_task(shared_memory.run())
        yield Stage(triton, shared_memory, TritonEngine(transport, shared_memory=shared_memory), observed)
        running.cancel()
        await shared_memory.close()
    assert own_files() == []
