"""Drops every packet of one connection to a gRPC server, and measures how long its client gets no answer.

Run it in a network namespace of its own: ``unshare --net python -m tests.triton.silent_network asyncio 20 5``.
Arguments: the client, the ``network_s`` of the gateway's own client, and the seconds before the first call.
"""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from app.grpc.client import Client, Options
from app.grpc.connection import KeepAlive
from app.grpc.rpc import RpcError, Transport
from app.triton.connect import MAX_MESSAGE_BYTES, SLOW_PINGS
from app.triton.grpcio import GrpcioTransport
from tests.triton.test_transports import Script, called, serving

DEADLINE_S = 2.0
LONGEST_S = 90.0
ESTABLISHED = "01"


def opened(kind: str, url: str, network_s: float) -> Transport:
    if kind == "grpcio":
        return GrpcioTransport(url, SLOW_PINGS, MAX_MESSAGE_BYTES)
    return Client(url, Options(KeepAlive(300.0, 20.0, network_s=network_s), MAX_MESSAGE_BYTES))


def client_port(server_port: int) -> int:
    """Returns the port of the only connection to the server. Source: proc(5), /proc/net/tcp."""
    rows = [line.split()[1:4] for path in ("tcp", "tcp6") for line in Path("/proc/net", path).read_text().splitlines()]
    (local,) = {
        local
        for local, remote, state in rows
        if state == ESTABLISHED and remote.endswith(f":{server_port:04X}") and not local.endswith(f":{server_port:04X}")
    }
    return int(local.rpartition(":")[2], 16)


def drop(port: int) -> None:
    for end in ("--sport", "--dport"):
        command = ["iptables", "-w", "-A", "INPUT", "-p", "tcp", end, str(port), "-j", "DROP"]
        subprocess.run(command, check=True)


async def measured(kind: str, network_s: float, idle_s: float) -> dict[str, float]:
    """Returns the seconds and the failed calls until the first answer."""
    async with serving(Script()) as url:
        transport = opened(kind, url, network_s)
        await called(transport)
        drop(client_port(int(url.rpartition(":")[2])))
        await asyncio.sleep(idle_s)
        failed, start = 0, time.monotonic()
        while time.monotonic() < start + LONGEST_S:
            try:
                await called(transport, timeout_s=DEADLINE_S)
                break
            except RpcError:
                failed += 1
                await asyncio.sleep(0.02)
        found = {"seconds": time.monotonic() - start, "failed": failed}
        await transport.close()
    return found


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    found = asyncio.run(measured(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
    sys.stdout.write(json.dumps(found))
