"""gRPC servers in the process of a benchmark, for measurements that a real Triton would disturb."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc


@asynccontextmanager
async def running(server: grpc.aio.Server) -> AsyncIterator[str]:
    """Serves on a free port for the duration of the block. Yields the address."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
