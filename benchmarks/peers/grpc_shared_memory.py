"""The lower bound for a binary body: a bare grpc.aio client whose tensor is in Triton's shared memory before the call.

No gateway that calls Triton over gRPC can be faster: it still has to receive the body.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from benchmarks.load.orders import GrpcAsk, TensorAsk
from benchmarks.load.process import load_process
from benchmarks.peers.contents import BINARY
from benchmarks.peers.grpc_client import bytes_ask
from benchmarks.peers.peer import Peer
from benchmarks.stage import Triton

NAME = "bare grpc.aio client, tensor in shared memory"


@asynccontextmanager
async def start(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    async with AsyncExitStack() as stack:
        asks = {}
        for name, file in BINARY.items():
            tensor = bytes_ask("FILE", (1,), [file])
            region = await stack.enter_async_context(_registered(triton, tensor))
            asks[name] = GrpcAsk("bench_file", (replace(tensor, region=region),))
        load = await stack.enter_async_context(load_process("grpc", triton.grpc_url, folder))
        yield Peer(NAME, load.pid, load, asks)


@asynccontextmanager
async def _registered(triton: Triton, tensor: TensorAsk) -> AsyncIterator[str]:
    """Creates a region with the tensor and yields its name."""
    size = len(tensor.raw)
    with closing(SharedMemory(f"benchmark_{os.getpid()}_{size}", create=True, size=size)) as memory:
        try:
            memory.buf[:size] = tensor.raw
            await triton.client.register_system_shared_memory(memory.name, f"/{memory.name}", size)
        finally:
            memory.unlink()
        yield memory.name
        await triton.client.unregister_system_shared_memory(memory.name)
