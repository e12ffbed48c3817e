"""Frames and messages are decoded correctly, wherever the bytes are split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grpc.frames import PREFIX, PREFIX_BYTES, Frame, FrameBuffer, MessageReader, frame_bytes
from app.grpc.rpc import RpcError

LIMIT = 64
FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=LIMIT))
)


def joined(frames: list[Frame]) -> bytes:
    return b"".join(frame_bytes(frame.kind, frame.flags, frame.stream_id, frame.content) for frame in frames)


@given(FRAMES, st.data())
def test_frames_do_not_depend_on_the_split(frames: list[Frame], data: st.DataObject) -> None:
    text, buffer, found = joined(frames), FrameBuffer(LIMIT), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += buffer.frames(text[start:end])
    assert found == frames


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    data = bytearray(frame_bytes(0, 0, 1))
    data[5] |= 0x80
    assert [frame.stream_id for frame in FrameBuffer(LIMIT).frames(bytes(data))] == [1]


MESSAGES = st.lists(st.binary(max_size=LIMIT), max_size=6)


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


@given(MESSAGES, st.data())
def test_messages_do_not_depend_on_the_split(messages: list[bytes], data: st.DataObject) -> None:
    body, reader, found = b"".join(map(framed, messages)), MessageReader(LIMIT), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        found += reader.messages(body[start:end])
    assert found == messages
    assert reader.is_between_messages
    assert reader.missing == PREFIX_BYTES


def test_the_prefix_gives_the_number_of_missing_bytes() -> None:
    reader = MessageReader(LIMIT)
    for piece, missing in ((b"\0\0", 3), (b"\0\0\x0a", 10), (b"", 10), (b"1234", 6)):
        assert list(reader.messages(piece)) == []
        assert (reader.missing, reader.is_between_messages) == (missing, False)


@pytest.mark.parametrize("prefix", [b"\x01\0\0\0\x01x", b"\0\0\0\0\x41"])
def test_messages_before_an_invalid_message_are_returned(prefix: bytes) -> None:
    messages = MessageReader(LIMIT).messages(framed(b"good") + prefix)
    assert next(messages) == b"good"
    with pytest.raises(RpcError):
        next(messages)
