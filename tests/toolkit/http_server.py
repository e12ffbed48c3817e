"""Small HTTP servers: in a thread one whose answers a test defines, and one with the files of a folder.

On the event loop one that serves images, and does what hostile servers do.
"""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, bytes], tuple[int, str, bytes]]
"""A request and its body -> status, media type and body of the answer."""
POLL_S = 0.02
"""How long the end of a server takes."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # waited for at the end, so that all connections are closed

    def handle_error(self, *_: Any) -> None:
        """For instance of a client that closes its connection because it does not trust the certificate."""


@contextmanager
def answering(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Runs the server for the duration of the block. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 1.0

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, media_type, content = answer(self, body)
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    with _running(Handler, tls) as port:
        yield port


@contextmanager
def served(folder: Path | str) -> Iterator[str]:
    """Serves the files of the folder for the duration of the block. Yields the origin."""

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with _running(partial(Files, directory=str(folder))) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(handler: Any, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    with _Server(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = isinstance(handler, partial)  # browsers keep connections open
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


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
