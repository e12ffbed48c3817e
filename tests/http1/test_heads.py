"""The checks of a request's head, without a socket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import InvalidRequest
from app.http1.framing import ChunkedBody, LengthBody, body_of, end_of_head

HOST = (b"host", b"gateway.example:8080")


@given(st.text("ab\r\n", max_size=12), st.integers(0, 12))
def test_the_end_of_a_head_is_found_across_two_pieces(text: str, split: int) -> None:
    data = text.encode()
    before, after = data[:split], data[split:]
    if b"\r\n\r\n" in before:
        return
    whole = data.find(b"\r\n\r\n")
    assert len(before) + end_of_head(before, after) == (whole + 4 if whole >= 0 else len(data))


def test_a_request_without_a_body_is_complete() -> None:
    assert body_of("1.1", [HOST]).is_complete
    assert body_of("1.1", [HOST, (b"content-length", b"0")]).is_complete
    assert body_of("1.0", []).is_complete


def test_content_length_sets_the_end_of_the_body() -> None:
    body = body_of("1.1", [HOST, (b"content-length", b"5")])
    assert isinstance(body, LengthBody)
    assert body.feed(b"hello!") == (b"hello", b"!")


@pytest.mark.parametrize("value", [b"chunked", b"Chunked", b"chunked \t"])
def test_transfer_encoding_selects_a_chunked_body(value: bytes) -> None:
    assert isinstance(body_of("1.1", [HOST, (b"transfer-encoding", value)]), ChunkedBody)


@pytest.mark.parametrize("host", [b"", b"x", b"127.0.0.1:80", b"[::1]:8080", b"a-b.example", b"a%20b"])
def test_a_valid_host_is_accepted(host: bytes) -> None:
    assert body_of("1.1", [(b"host", host)]).is_complete


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
        body_of(version, headers)
