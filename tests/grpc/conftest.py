"""The frames of a server, and a transport without a network."""

import struct
from collections.abc import Callable, Iterable
from typing import Any

from app.grpc import frames
from app.grpc.connection import PREFIX
from app.grpc.frames import frame_bytes

OK = b"\x88"
"""``:status: 200``."""
REQUEST = bytes.fromhex("8386") + b"\x04\x02/x" + b"\x01\x01h"
"""``:method: POST``, ``:scheme: http``, ``:path: /x``, ``:authority: h``."""
END = frames.END_HEADERS | frames.END_STREAM
SETTINGS = frame_bytes(frames.SETTINGS, 0, 0)


def field(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def status_of(number: bytes) -> bytes:
    return field(b"grpc-status", number)


def message(content: bytes) -> bytes:
    return PREFIX.pack(0, len(content)) + content


def headers_frame(stream_id: int, block: bytes = OK) -> bytes:
    return frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, block)


def last_headers(stream_id: int, block: bytes = OK) -> bytes:
    return frame_bytes(frames.HEADERS, END, stream_id, block)


def data_frame(stream_id: int, content: bytes, flags: int = 0) -> bytes:
    return frame_bytes(frames.DATA, flags, stream_id, content)


def reset_frame(stream_id: int, code: int) -> bytes:
    return frame_bytes(frames.RST_STREAM, 0, stream_id, struct.pack(">I", code))


def window_update(stream_id: int, size: int) -> bytes:
    return frame_bytes(frames.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", size))


def settings_frame(number: int, value: int) -> bytes:
    return frame_bytes(frames.SETTINGS, 0, 0, struct.pack(">HI", number, value))


def goaway(last_stream_id: int) -> bytes:
    return frame_bytes(frames.GOAWAY, 0, 0, struct.pack(">II", last_stream_id, 0))


class FakeTransport:
    """Passes what is written to ``receive``, and records whether the connection reads."""

    def __init__(self, receive: Callable[[bytes], object] = lambda data: None) -> None:
        self.is_reading = True
        self.paused = self.resumed = 0
        self._receive = receive

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False
        self.paused += 1

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True
        self.resumed += 1

    def write(self, data: bytes) -> None:
        self._receive(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        self._receive(b"".join(parts))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False
