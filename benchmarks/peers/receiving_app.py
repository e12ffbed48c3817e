"""An HTTP server on uvloop that receives each body into reused memory, and answers with its size."""

import asyncio
import re
import sys
from typing import cast

import uvloop

MOST_BYTES = 32 * 2**20
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Receiver(asyncio.BufferedProtocol):
    """One connection with sequential requests. The head of each request must be in its first bytes."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(MOST_BYTES))
        self._filled = 0
        self._end: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, _size_hint: int) -> memoryview:
        return self._memory[self._filled :]

    def buffer_updated(self, size: int) -> None:
        self._filled += size
        if self._end is None:
            self._end = self._end_of_request()
        if self._filled == self._end:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            self._filled, self._end = 0, None

    def _end_of_request(self) -> int | None:
        """Returns None while the head is incomplete."""
        head, separator, _ = bytes(self._memory[: min(self._filled, 65536)]).partition(b"\r\n\r\n")
        if not separator:
            return None
        length = _LENGTH.search(head)
        return len(head) + len(separator) + (int(length.group(1)) if length else 0)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
