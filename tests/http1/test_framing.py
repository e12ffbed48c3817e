"""The checks of a request's head, and the end of its body, without a socket."""

from types import SimpleNamespace
from typing import Any

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.core.errors import GatewayError, HeadersTooLarge, InvalidRequest
from app.http1.framing import CHUNKS_AT_ONCE, FRAMING_PER_BYTE, MAX_FRAMING_BYTES, ChunkedBody
from app.http1.protocol import length_of_body

HOST = (b"host", b"gateway.example:8080")
HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def received(body: ChunkedBody, data: bytes, *, piece: int = 1 << 20) -> tuple[bytes, bytes]:
    """Feeds ``data`` in pieces. Returns the body's content and the bytes after its end."""
    found, rest = b"", b""
    for start in range(0, len(data), piece):
        rest += data[start : start + piece]
        more = b"-"
        while rest and more and not body.is_complete:
            more, rest = body.feed(rest)
            found += more
    return found, rest


def chunked(chunks: list[bytes], trailers: bytes = b"") -> bytes:
    return b"".join(b"%X;a=b\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailers + b"\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40)), st.binary(), st.integers(1, 50))
def test_a_chunked_body_in_any_pieces(chunks: list[bytes], following: bytes, piece: int) -> None:
    body = ChunkedBody()
    assert received(body, chunked(chunks, b"X: y\r\n") + following, piece=piece) == (b"".join(chunks), following)
    assert body.is_complete


@given(
    st.lists(
        st.sampled_from(
            [b"0", b"5", b"\r\n", b"\n", b"\r", b";", b" ", b"a:b", b"x", b"hello", b"\0", b",", b"=", b'"']
        )
    )
)
@example([b"5", b"\r\n", b"hello", b"\r\n", b"0", b"\r\n", b"a:b", b"\r\n", b"\r\n"])
def test_an_accepted_body_means_the_same_to_another_parser(parts: list[bytes]) -> None:
    data = b"".join(parts)
    body = ChunkedBody()
    try:
        found, rest = received(body, data)
    except GatewayError:
        return
    if body.is_complete:
        assert _of_httptools(data.removesuffix(rest) if rest else data) == (found, True)


def _of_httptools(data: bytes) -> tuple[bytes, bool]:
    pieces: list[bytes] = []
    ends: list[bool] = []
    events: Any = SimpleNamespace(on_body=pieces.append, on_message_complete=lambda: ends.append(True))
    httptools.HttpRequestParser(events).feed_data(HEAD + data)
    return b"".join(pieces), bool(ends)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\r\rhello\r\n",
        b"5\r\nhello",
        b"5\r\nhelloo\r\n",
        b"5\r\nhello\n",
        b"5;\0\r\nhello\r\n",
        b"5;\r\nhello\r\n",
        b"5;;a\r\nhello\r\n",
        b"5;a=\r\nhello\r\n",
        b'5;a="b\r\nhello\r\n',
        b"11111111111111111\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n: no name\r\n\r\n",
        b"0\r\nx : y\r\n\r\n",
        b"0\r\nx: y\n\n",
        b"0\r\nx: y\rz\r\n\r\n",
        b"0\r\n x: y\r\n\r\n",
    ],
)
def test_a_malformed_chunked_body_is_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        received(ChunkedBody(), data + b"\n0\r\n\r\n")


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    ("before", "endless"),
    [
        (b"0\r\n", b"a:b\r\n"),
        (b"0\r\na:", b"b"),
        (b"0\r\n", b"a"),
        (b"5;", b"x"),
        (b"", b"0"),
        (b"5\r\nhello", b"\r"),
    ],
)
def test_framing_is_limited(before: bytes, endless: bytes, piece: int) -> None:
    body = ChunkedBody()
    with pytest.raises((HeadersTooLarge, InvalidRequest)):
        received(body, before + endless * (2 * MAX_FRAMING_BYTES // len(endless)), piece=piece)
    assert len(body._line) <= MAX_FRAMING_BYTES + FRAMING_PER_BYTE * 5


def test_trailers_after_a_large_body_are_limited() -> None:
    data = chunked([bytes(1 << 20)], b"a:b\r\n" * (MAX_FRAMING_BYTES // 5 + 1))
    with pytest.raises(HeadersTooLarge):
        received(ChunkedBody(), data)


def test_many_chunks_are_decoded_in_several_steps() -> None:
    body = ChunkedBody()
    found, rest = body.feed(b"1\r\nx\r\n" * 2 * CHUNKS_AT_ONCE)
    assert (len(found), bool(rest), body.is_complete) == (CHUNKS_AT_ONCE, True, False)


@pytest.mark.parametrize(
    ("version", "headers", "length"),
    [
        ("1.1", [HOST], 0),
        ("1.0", [], 0),
        ("1.1", [HOST, (b"content-length", b"0")], 0),
        ("1.1", [HOST, (b"content-length", b"5")], 5),
        *[
            ("1.1", [(b"host", host)], 0)
            for host in (b"", b"x", b"127.0.0.1:80", b"[::1]:8080", b"a-b.example", b"a%20b")
        ],
        *[("1.1", [HOST, (b"transfer-encoding", each)], None) for each in (b"chunked", b"Chunked", b"chunked \t")],
    ],
)
def test_a_head_gives_the_length_of_its_body(
    version: str, headers: list[tuple[bytes, bytes]], length: int | None
) -> None:
    assert length_of_body(version, headers) == length


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", []),
        ("1.1", [HOST, HOST]),
        ("1.0", [HOST, HOST]),
        ("1.1", [(b"host", b"a b")]),
        ("1.1", [(b"host", b"a/b")]),
        ("1.1", [(b"host", b"user@a")]),
        ("1.1", [(b"host", b"a\xff")]),
        ("0.9", [HOST]),
        ("2.0", [HOST]),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")]),
        ("1.1", [HOST, (b"transfer-encoding", b"chunked, gzip")]),
        ("1.1", [HOST, (b"transfer-encoding", b"identity")]),
        ("1.1", [HOST, (b"transfer-encoding", b"")]),
        ("1.1", [HOST, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")]),
        ("1.1", [HOST, (b"transfer-encoding", b"chunked"), (b"content-length", b"5")]),
        ("1.0", [HOST, (b"transfer-encoding", b"chunked")]),
        ("1.1", [HOST, (b"content-length", b"5"), (b"content-length", b"5")]),
        ("1.1", [HOST, (b"content-length", b"+5")]),
        ("1.1", [HOST, (b"content-length", b"")]),
    ],
)
def test_ambiguous_framing_is_rejected(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidRequest):
        length_of_body(version, headers)
