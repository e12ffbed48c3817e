"""Opens an engine for the commands ``check`` and ``models``."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from app.core.engine import InferenceServer
from app.core.errors import UpstreamUnavailable
from app.triton.credentials import Credentials
from app.triton.engine import TritonEngine
from app.triton.fleet.addresses import addresses_of
from app.triton.fleet.balancer import Balancer
from app.triton.fleet.server import TritonServer
from app.triton.transports import open_transport


@asynccontextmanager
async def open_engine(url: str, credentials: Credentials) -> AsyncIterator[InferenceServer]:
    """Opens an engine for the duration of the block. ``url``: see ``GATEWAY_TRITON_URL``.

    If there are several addresses, their models are compared. Raises UpstreamUnavailable with
    the address, ValueError or CredentialsUnusable.
    """
    try:
        async with _opened(url, credentials) as engine:
            yield engine
    except UpstreamUnavailable as exc:
        raise UpstreamUnavailable(f"Nothing answers at {url} (gRPC). Is it Triton's gRPC port, usually 8001?") from exc


@asynccontextmanager
async def _opened(url: str, credentials: Credentials) -> AsyncIterator[InferenceServer]:
    async with AsyncExitStack() as stack:
        engines = {
            address: TritonEngine(await stack.enter_async_context(open_transport(address, credentials=credentials)))
            for address in addresses_of(url)
        }
        if len(engines) == 1:
            yield next(iter(engines.values()))
            return
        balancer = Balancer()
        balancer.servers += [TritonServer(address, engine) for address, engine in engines.items()]
        yield balancer
