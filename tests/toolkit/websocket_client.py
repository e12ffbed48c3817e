"""WebSockets to a gateway: the library's client, and raw frames for what no client sends."""

import base64
import json
import os
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.toolkit.connections import dialed, rest
from tests.toolkit.processes import GatewayProcess

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
FIN = 0x80


def opened(gateway: GatewayProcess | str, pipeline: str, query: str = "", **options: Any) -> connect:
    """``gateway``: or the URL of a proxy."""
    base = gateway if isinstance(gateway, str) else gateway.url
    url = f"{base.replace('http', 'ws', 1)}/v1/pipelines/{pipeline}/session{query}"
    return connect(url, **({"proxy": None, "compression": None, "max_size": None} | options))


def connected_to(port: int) -> connect:
    return connect(f"ws://127.0.0.1:{port}/", proxy=None, compression=None)


def script(**keys: Any) -> str:
    """The JSON body of a request to a scripted pipeline."""
    return json.dumps({"script": json.dumps(keys)})


async def event_of(client: ClientConnection) -> tuple[str, int, Any]:
    """Returns the name, the request's number and the data of the next event."""
    event = json.loads(await client.recv())
    return event["event"], event["request"], event["data"]


async def events_of(client: ClientConnection, request: int) -> list[tuple[str, Any]]:
    """Returns the names and the data of a request's events up to the terminal one. Other requests have none."""
    events: list[tuple[str, Any]] = []
    while not events or events[-1][0] == "output":
        name, number, data = await event_of(client)
        assert number == request
        events.append((name, data))
    return events


class RawSocket:
    """Sends any bytes as frames of a client."""

    def __init__(self, gateway: GatewayProcess, pipeline: str, receive_bytes: int | None = None) -> None:
        self.connection = dialed(gateway, 60, receive_bytes)
        self.connection.sendall(handshake(pipeline))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.connection.recv(1)

    def __enter__(self) -> "RawSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, *frames: bytes) -> None:
        self.connection.sendall(b"".join(frames))

    def close_code(self) -> tuple[int, str]:
        """Reads to the end of the connection. Returns the code and the reason of the close frame."""
        opcode, data = frames_in(rest(self.connection))[-1]
        assert opcode == CLOSE
        return int.from_bytes(data[:2]), data[2:].decode()


def handshake(pipeline: str, *lines: str, key: bytes = b"0123456789abcdef") -> bytes:
    encoded = base64.b64encode(key).decode()
    head = [
        f"GET /v1/pipelines/{pipeline}/session HTTP/1.1",
        "Host: localhost",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {encoded}",
        *lines,
    ]
    return "\r\n".join([*head, "", ""]).encode()


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, length: int | None = None, masked: bool = True) -> bytes:
    """``length``: what the frame declares, if it is not the length of ``data``."""
    size, head = len(data) if length is None else length, bytes([FIN * fin | opcode])
    bit = 0x80 * masked
    if size < 126:
        head += bytes([bit | size])
    elif size < 65536:
        head += bytes([bit | 126]) + size.to_bytes(2)
    else:
        head += bytes([bit | 127]) + size.to_bytes(8)
    mask = os.urandom(4) if masked else b""
    pad = (mask * (len(data) // 4 + 1))[: len(data)] if masked else bytes(len(data))
    return head + mask + (int.from_bytes(data) ^ int.from_bytes(pad)).to_bytes(len(data))


def frames_in(received: bytes) -> list[tuple[int, bytes]]:
    """The complete frames of a server, which are not masked: opcode and data."""
    frames = []
    while len(received) > 1:
        size = received[1] & 127
        start = {126: 4, 127: 10}.get(size, 2)
        end = start + (size if start == 2 else int.from_bytes(received[2:start]))
        if len(received) < end:
            break
        frames.append((received[0] & 15, received[start:end]))
        received = received[end:]
    return frames
