"""HTTP/1.1 as bytes, for clients that keep, cut or stall their connections."""

import json
import socket
from urllib.parse import urlsplit

from tests.toolkit.processes import GatewayProcess


def post(
    path: str, body: object, *headers: str, size: int | None = None, media_type: str = "application/json"
) -> bytes:
    """Returns the bytes of a POST.

    Args:
        path: the request target.
        body: bytes, or a value that is sent as JSON.
        headers: further lines of the head.
        size: what Content-Length declares, if it is not the length of the body.
        media_type: of the body.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(content) if size is None else size
    lines = ["Host: localhost", f"Content-Type: {media_type}", f"Content-Length: {length}", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + content


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def dialed(gateway: GatewayProcess, timeout_s: float = 20.0) -> socket.socket:
    address = urlsplit(gateway.url)
    return socket.create_connection((address.hostname, address.port), timeout_s)


def received(connection: socket.socket, until: bytes) -> bytes:
    """Returns what arrives up to ``until``."""
    data = b""
    while until not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def rest(connection: socket.socket) -> bytes:
    """Returns what arrives until the gateway closes the connection."""
    data = b""
    with connection:
        while part := connection.recv(65536):
            data += part
    return data
