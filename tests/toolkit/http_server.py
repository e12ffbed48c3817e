"""Small HTTP servers in a thread: one whose answers a test defines, and one with the files of a folder."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, bytes], tuple[int, str, bytes]]
"""A request and its body -> status, media type and body of the answer."""
POLL_S = 0.02
"""How long the end of a server takes."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # waited for at the end, so that no connection is left open

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
