"""A small HTTP server on loopback that serves images, and does what hostile servers do."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(60))
GIF = b"GIF89a" + bytes(range(40))
HUGE_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\x27\x10\0\0\x27\x10\x08\x02\0\0\0"
"""The beginning of an image of 10,000 x 10,000 pixels."""


def answer(content: bytes = PNG, status: str = "200 OK", **headers: str) -> bytes:
    """``headers``: with underscores instead of hyphens."""
    given = {"content_type": "image/png", "content_length": str(len(content)), **headers}
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + content


@dataclass
class ImageHost:
    """``requests``: the heads of the requests. ``names``: the TLS names that clients asked for."""

    port: int
    answers: Mapping[str, bytes]
    requests: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """``/slow`` never answers, ``/endless`` never ends."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            path = head.split(" ")[1]
            if path in self.answers:
                writer.write(self.answers[path])
                return
            while path != "/slow":
                writer.write(answer(b"", content_length="1000000000") if path else bytes(64 * 1024))
                path = ""
                await writer.drain()
            await asyncio.sleep(60)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def image_host(answers: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> AsyncIterator[ImageHost]:
    host = ImageHost(0, answers)
    if tls is not None:
        tls.sni_callback = lambda _socket, name, _context: host.names.append(name)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
