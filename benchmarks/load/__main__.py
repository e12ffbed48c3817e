"""The load process: see the package's docstring."""

import sys
from multiprocessing.connection import Connection

import uvloop

from benchmarks.load.client import Client, Worker


def main() -> None:
    kind, address, descriptor = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    loop = uvloop.new_event_loop()
    with Connection(int(descriptor)) as benchmark:
        worker = Worker(loop.run_until_complete(_client(kind, host, int(port))))
        while (order := benchmark.recv()) is not None:
            try:
                report = loop.run_until_complete(worker.perform(order))
            except Exception as exc:
                report = exc
            benchmark.send(report)


async def _client(kind: str, host: str, port: int) -> Client:
    """Imports only the libraries of the given kind, because others would affect memory and garbage collection."""
    if kind == "http":
        from benchmarks.load.http import HttpClient  # noqa: PLC0415

        return HttpClient(host, port)
    from benchmarks.load.grpc import GrpcClient  # noqa: PLC0415

    client = GrpcClient(f"{host}:{port}")
    await client.connect()
    return client


if __name__ == "__main__":
    main()
