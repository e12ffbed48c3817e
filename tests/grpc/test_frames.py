"""Frames are decoded correctly, wherever the bytes are split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grpc.frames import ConnectionFailed, Frame, FrameBuffer, frame_bytes

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


def test_a_large_frame_is_rejected_at_its_header() -> None:
    with pytest.raises(ConnectionFailed):
        list(FrameBuffer(LIMIT).frames(frame_bytes(0, 0, 1, b"x" * (LIMIT + 1))[:9]))
