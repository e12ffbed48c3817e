"""Checks of a request's head that the parser lacks, and the framing of its body, without I/O."""

import re
from collections.abc import Sequence

from app.api.connection.framing import Body, ChunkedBody, LengthBody
from app.domain.errors import InvalidRequest

MAX_HEAD_BYTES = 16 * 1024
END_OF_HEAD = b"\r\n\r\n"
VERSIONS = {"1.0", "1.1"}

_HOST = re.compile(rb"[0-9A-Za-z._~!$&'()*+,;=:%\[\]-]*")


def end_of_head(before: bytes, data: bytes) -> int:
    """Returns the end of the first empty line in ``data``, or its length. ``before``: the bytes before ``data``."""
    if before:
        before = before[1 - len(END_OF_HEAD) :]
        across = (before + data[: len(END_OF_HEAD) - 1]).find(END_OF_HEAD)
        if across >= 0:
            return across + len(END_OF_HEAD) - len(before)
    inside = data.find(END_OF_HEAD)
    return inside + len(END_OF_HEAD) if inside >= 0 else len(data)


def body_of(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Body:
    """Returns the body to receive, for headers with names in lower case.

    Raises InvalidRequest if two servers could disagree about the request's host or its end.
    """
    if version not in VERSIONS:
        raise InvalidRequest("The gateway speaks HTTP/1.1 and HTTP/1.0.")
    hosts: list[bytes] = []
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    wanted = {b"host": hosts, b"content-length": lengths, b"transfer-encoding": encodings}
    for name, value in headers:
        if name in wanted:
            wanted[name].append(value.strip(b" \t"))
    _check_host(version, hosts)
    if encodings:
        _check_encoding(version, encodings, lengths)
        return ChunkedBody()
    if not lengths:
        return LengthBody(0)
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise InvalidRequest("The request must have one Content-Length, a number.")
    return LengthBody(int(lengths[0]))


def _check_host(version: str, hosts: list[bytes]) -> None:
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidRequest("The request must have exactly one Host header.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidRequest("The Host header is not a valid host.")


def _check_encoding(version: str, encodings: list[bytes], lengths: list[bytes]) -> None:
    if version == "1.0" or lengths or [encoding.lower() for encoding in encodings] != [b"chunked"]:
        raise InvalidRequest("The only Transfer-Encoding is 'chunked', in HTTP/1.1, without a Content-Length.")
