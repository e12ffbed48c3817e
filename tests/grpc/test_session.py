"""The client side of HTTP/2, tested with an independent implementation (h2) and with a peer that breaks the rules.

Frames and messages are decoded correctly, wherever the bytes are split.
"""

from collections.abc import Iterator
from itertools import pairwise

import h2.config
import h2.connection
import h2.events
import pytest
from hpack.hpack import encode_integer
from hypothesis import given, settings
from hypothesis import strategies as st

from app.grpc import frames
from app.grpc.connection import PREFIX_BYTES, MessageReader
from app.grpc.frames import CANCEL, ConnectionFailed, Frame, Headers, frame_bytes
from app.grpc.http2_session import FrameBuffer, Http2Stream, Session
from app.grpc.rpc import RpcError
from tests.grpc.conftest import (
    OK,
    REQUEST,
    SETTINGS,
    data_frame,
    headers_frame,
    last_headers,
    message,
    reset_frame,
    settings_frame,
    window_update,
)

WINDOW = 64 * 1024
Event = tuple[object, ...]


class RecordedStream(Http2Stream):
    """Adds an event for each call of the session: the id of the stream, and the arguments."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def received_headers(self, headers: Headers, is_end: bool) -> None:
        self._events.append((self.stream_id, headers, is_end))

    def received_data(self, data: bytes, size: int, is_end: bool) -> None:
        self._events.append((self.stream_id, data, size, is_end))

    def was_reset(self, code: int, reason: str) -> None:
        self._events.append((self.stream_id, code, reason))


class RecordedSession(Session):
    """Keeps what its streams get."""

    def __init__(self, stream_window: int = WINDOW) -> None:
        super().__init__(stream_window)
        self._events: list[Event] = []

    def begin(self, body: bytes, header_block: bytes = REQUEST) -> int:
        """Opens a stream. Returns its id."""
        stream = RecordedStream(self._events)
        self.open(stream, header_block, body)
        return stream.stream_id

    def events_of(self, data: bytes) -> list[Event]:
        self._events.clear()
        self.receive(data)
        return list(self._events)

    def sent(self) -> bytes:
        sent = b"".join(self.output)
        self.output.clear()
        return sent


class Peer:
    """A server of h2, connected to a session without a network."""

    def __init__(self, session: RecordedSession) -> None:
        self.session = session
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.server = h2.connection.H2Connection(config)
        self.server.initiate_connection()
        self.seen: list[h2.events.Event] = []

    def exchange(self) -> list[Event]:
        """Exchanges bytes in both directions until both are idle. Returns the events of the session."""
        events: list[Event] = []
        while True:
            to_server, to_client = self.session.sent(), self.server.data_to_send()
            if not to_server and not to_client:
                return events
            self.seen += self.server.receive_data(to_server)
            events += self.session.events_of(to_client)

    def received(self, stream_id: int) -> bytes:
        """Returns the body that the server received, and acknowledges it."""
        found = [each for each in self.seen if isinstance(each, h2.events.DataReceived) and each.stream_id == stream_id]
        self.seen = [each for each in self.seen if each not in found]
        for event in found:
            self.server.acknowledge_received_data(event.flow_controlled_length, stream_id)
        return b"".join(event.data for event in found)


@pytest.fixture
def session() -> RecordedSession:
    return RecordedSession()


@pytest.fixture
def peer(session: RecordedSession) -> Peer:
    peer = Peer(session)
    assert peer.exchange() == []
    return peer


def events_of(session: RecordedSession, *frames_of_peer: bytes) -> list[Event]:
    return session.events_of(SETTINGS + b"".join(frames_of_peer))


def test_a_request_and_its_response(session: RecordedSession, peer: Peer) -> None:
    stream_id = session.begin(b"question")
    peer.exchange()
    (request,) = (event for event in peer.seen if isinstance(event, h2.events.RequestReceived))
    assert dict(request.headers or ()) == {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/x",
        b":authority": b"h",
    }
    assert peer.received(stream_id) == b"question"
    peer.server.send_headers(stream_id, [(":status", "200"), ("a", "1")])
    peer.server.send_data(stream_id, b"answer")
    peer.server.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
    head, data, trailers = peer.exchange()
    assert head == (stream_id, ((b":status", b"200"), (b"a", b"1")), False)
    assert data == (stream_id, b"answer", 6, False)
    assert trailers == (stream_id, ((b"grpc-status", b"0"),), True)
    assert stream_id not in session.streams


@pytest.mark.parametrize("size", [16_350, 16_384, 40_000])
def test_a_header_block_larger_than_a_frame_is_continued(session: RecordedSession, size: int) -> None:
    peer = Peer(session)
    peer.server.local_settings.max_header_list_size = 65_536
    peer.server.decoder.max_header_list_size = 65_536
    peer.exchange()
    value = b"t" * size
    stream_id = session.begin(b"question", REQUEST + b"\x10\x05token" + encode_integer(len(value), 7) + value)
    peer.exchange()
    (request,) = (event for event in peer.seen if isinstance(event, h2.events.RequestReceived))
    assert dict(request.headers or ())[b"token"] == value
    assert peer.received(stream_id) == b"question"


def test_waiting_bodies_share_the_connections_window(session: RecordedSession, peer: Peer) -> None:
    bodies = {session.begin(bytes([n]) * 200_000): bytes([n]) * 200_000 for n in range(3)}
    got = dict.fromkeys(bodies, b"")
    for _ in range(200):
        peer.exchange()
        for stream_id in bodies:
            got[stream_id] += peer.received(stream_id)
    assert got == bodies


def test_a_cancelled_stream_is_reset_and_ignored(session: RecordedSession, peer: Peer) -> None:
    stream_id = session.begin(b"")
    peer.exchange()
    peer.server.send_headers(stream_id, [(":status", "200")])
    session.reset(session.streams[stream_id])
    assert peer.exchange() == []
    (reset,) = (event for event in peer.seen if isinstance(event, h2.events.StreamReset))
    assert reset.error_code == CANCEL
    assert stream_id not in session.streams


def test_data_of_a_cancelled_stream_returns_to_the_connections_window(session: RecordedSession) -> None:
    session.receive(SETTINGS)
    stream_id = session.begin(b"")
    session.reset(session.streams[stream_id])
    session.sent()
    received, half = data_frame(stream_id, bytes(frames.MAX_FRAME_BYTES)), frames.CONNECTION_WINDOW // 2
    for _ in range(half // frames.MAX_FRAME_BYTES):
        assert session.events_of(received) == []
    assert session.sent() == b""
    session.receive(received)
    assert session.sent() == window_update(0, half + frames.MAX_FRAME_BYTES)


def test_pings_are_acknowledged_in_both_directions(session: RecordedSession, peer: Peer) -> None:
    session.ping(b"12345678")
    peer.server.ping(b"abcdefgh")
    assert peer.exchange() == []
    pings = [event for event in peer.seen if isinstance(event, h2.events.PingReceived | h2.events.PingAckReceived)]
    assert sorted(event.ping_data for event in pings) == [b"12345678", b"abcdefgh"]


def test_goaway_names_the_streams_that_were_not_processed(session: RecordedSession, peer: Peer) -> None:
    first, second = session.begin(b""), session.begin(b"")
    peer.exchange()
    peer.server.close_connection(0, last_stream_id=first)
    assert peer.exchange() == [(second, frames.REFUSED_STREAM, "the server is going away")]
    assert session.is_closing
    assert session.streams.keys() == {first}


def test_the_settings_of_the_server_are_applied(session: RecordedSession, peer: Peer) -> None:
    peer.server.update_settings({3: 7, 4: 1_000_000, 5: 100_000})
    peer.exchange()
    assert session.max_concurrent_streams == 7
    stream_id = session.begin(b"x" * 60_000)
    assert session.sent().endswith(data_frame(stream_id, b"x" * 60_000, frames.END_STREAM))


def test_a_new_initial_window_applies_to_bodies_that_wait(session: RecordedSession, peer: Peer) -> None:
    peer.server.increment_flow_control_window(1_000_000)
    stream_id = session.begin(b"x" * 100_000)
    peer.exchange()
    peer.server.update_settings({4: 100_000})
    peer.exchange()
    assert len(peer.received(stream_id)) == 100_000


def test_repeated_header_blocks_are_decoded_once(session: RecordedSession) -> None:
    stream_ids = [session.begin(b"") for _ in range(3)]
    blocks = [last_headers(each) for each in stream_ids]
    found = events_of(session, *blocks)
    assert found == [(each, ((b":status", b"200"),), True) for each in stream_ids]
    assert len({id(headers) for _, headers, _ in found}) == 1


def test_padding_priority_and_continuation_are_decoded(session: RecordedSession) -> None:
    stream_id = session.begin(b"")
    head = b"\x02" + b"\0" * 7
    flags = frames.PADDED | frames.HAS_PRIORITY
    found = events_of(
        session,
        frame_bytes(frames.HEADERS, flags, stream_id, head),
        frame_bytes(frames.CONTINUATION, frames.END_HEADERS, stream_id, OK),
        data_frame(stream_id, b"\x03abc\0\0\0", frames.PADDED | frames.END_STREAM),
    )
    assert found == [
        (stream_id, ((b":status", b"200"),), False),
        (stream_id, b"abc", 7, True),
    ]


def test_unknown_frames_and_settings_are_ignored(session: RecordedSession) -> None:
    unknown = settings_frame(0x99, 1)
    assert (
        events_of(session, frame_bytes(0x77, 255, 5, b"?"), unknown, frame_bytes(frames.PRIORITY, 0, 9, b"12345")) == []
    )


VIOLATIONS = {
    "headers first": headers_frame(1),
    "push promise": frame_bytes(frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\x02"),
    "a stream never opened": data_frame(3, b"x"),
    "an even stream": headers_frame(2),
    "data of the connection": data_frame(0, b"x"),
    "a settings frame of odd size": frame_bytes(frames.SETTINGS, 0, 0, b"12345"),
    "settings of a stream": frame_bytes(frames.SETTINGS, 0, 1),
    "an acknowledgement with content": frame_bytes(frames.SETTINGS, frames.ACK, 0, b"123456"),
    "a frame size out of range": settings_frame(5, 1),
    "a window of 2^31": settings_frame(4, 2**31),
    "the connection's window over 2^31-1": window_update(0, 2**31 - 1),
    "an update of 0": frame_bytes(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
    "an update of 3 bytes": frame_bytes(frames.WINDOW_UPDATE, 0, 0, bytes(3)),
    "a ping of 7 bytes": frame_bytes(frames.PING, 0, 0, bytes(7)),
    "a ping of a stream": frame_bytes(frames.PING, 0, 1, bytes(8)),
    "a short goaway": frame_bytes(frames.GOAWAY, 0, 0, bytes(7)),
    "a short reset": frame_bytes(frames.RST_STREAM, 0, 1, bytes(3)),
    "a reset of the connection": frame_bytes(frames.RST_STREAM, 0, 0, bytes(4)),
    "padding over all": data_frame(1, b"\x02x", frames.PADDED),
    "padding without a length": data_frame(1, b"", frames.PADDED),
    "a short priority": frame_bytes(frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY, 1, b"1234"),
    "continuation alone": frame_bytes(frames.CONTINUATION, frames.END_HEADERS, 1, OK),
    "an interrupted block": frame_bytes(frames.HEADERS, 0, 1, OK) + frame_bytes(frames.PING, 0, 0, bytes(8)),
    "a block of another stream": frame_bytes(frames.HEADERS, 0, 1, OK)
    + frame_bytes(frames.CONTINUATION, frames.END_HEADERS, 3, OK),
    "an unknown table index": headers_frame(1, b"\xff\xff\xff\x7f"),
    "a cut block": headers_frame(1, b"\0\x05ab"),
    "an entry of the dynamic table": headers_frame(1, b"\xbe"),
    "a large frame": b"\xff\xff\xff\0\0\0\0\0\x01",
    "endless empty continuation": frame_bytes(frames.HEADERS, 0, 1, OK)
    + frame_bytes(frames.CONTINUATION, 0, 1) * 1_100_000,
    "endless headers": frame_bytes(frames.HEADERS, 0, 1, OK)
    + frame_bytes(frames.CONTINUATION, 0, 1, b"x" * 10_000) * 110,
}
"""The frames of a server after its settings, which are missing from the first ones."""


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_protocol_violation_closes_the_connection(session: RecordedSession, name: str) -> None:
    session.begin(b"")
    if name != "headers first":
        session.events_of(SETTINGS)
    with pytest.raises(ConnectionFailed):
        session.events_of(VIOLATIONS[name])


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (data_frame(1, b"x" * (WINDOW + 1)), "the stream's window was not respected"),
        (window_update(1, 2**31 - 1), "malformed WINDOW_UPDATE"),
    ],
    ids=["data over the window", "a window over 2^31"],
)
def test_a_violation_of_a_streams_window_resets_the_stream(session: RecordedSession, sent: bytes, reason: str) -> None:
    stream_id = session.begin(b"")
    assert events_of(session, sent) == [(stream_id, 3, reason)]
    assert stream_id not in session.streams


def test_headers_over_the_limit_reset_only_their_stream(session: RecordedSession) -> None:
    first, second = session.begin(b""), session.begin(b"")
    large = frame_bytes(frames.HEADERS, 0, first, OK) + frame_bytes(frames.CONTINUATION, 0, first, bytes(10_000)) * 7
    rest = frame_bytes(frames.CONTINUATION, frames.END_HEADERS, first)
    good = headers_frame(second)
    assert events_of(session, large, rest, good) == [
        (first, 11, "metadata size exceeds the limit of 65536 bytes"),
        (second, ((b":status", b"200"),), False),
    ]


@pytest.mark.parametrize("size", range(65_330, 65_537, 3))
def test_a_text_near_the_limit_of_headers_ends_at_most_its_stream(session: RecordedSession, size: int) -> None:
    """The limit of a header list counts 32 bytes for each field, and the names. The size of a block has neither."""
    first, second = session.begin(b""), session.begin(b"")
    value = b"x" * size
    text = b"\x10\x0cgrpc-message" + encode_integer(len(value), 7) + value
    parts = [text[start : start + 16_384] for start in range(0, len(text), 16_384)]
    block = frame_bytes(frames.HEADERS, frames.END_STREAM, first, OK) + b"".join(
        frame_bytes(frames.CONTINUATION, 0 if part is not parts[-1] else frames.END_HEADERS, first, part)
        for part in parts
    )
    good = headers_frame(second)
    large, after = events_of(session, block, good)
    assert after == (second, ((b":status", b"200"),), False)
    if size > 65_450:
        assert large == (first, 11, "metadata size exceeds the limit of 65536 bytes")
    else:
        assert large == (first, ((b":status", b"200"), (b"grpc-message", value)), True)


def test_a_window_of_zero_delays_the_body(session: RecordedSession) -> None:
    zero = settings_frame(4, 0)
    assert session.events_of(zero) == []
    session.sent()
    stream_id = session.begin(b"body")
    assert b"body" not in session.sent()
    more = window_update(stream_id, 4)
    assert session.events_of(more) == []
    assert session.sent() == data_frame(stream_id, b"body", frames.END_STREAM)


def test_an_early_response_stops_the_request(session: RecordedSession) -> None:
    session.events_of(SETTINGS)
    stream_id = session.begin(b"x" * 1_000_000)
    session.sent()
    end = last_headers(stream_id)
    assert len(session.events_of(end)) == 1
    assert session.sent() == reset_frame(stream_id, 0)
    assert stream_id not in session.streams


ANY_FRAME = st.builds(
    frame_bytes,
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1]),
    st.one_of(st.binary(max_size=64), st.just(OK), st.just(b"\0\0\0\x01")),
)


@settings(max_examples=500)
@given(st.lists(st.one_of(ANY_FRAME, st.binary(max_size=32)), max_size=20), st.booleans())
def test_any_bytes_are_received_or_fail_the_connection(pieces: list[bytes], with_settings: bool) -> None:
    session = RecordedSession(1024)
    for _ in range(3):
        session.begin(b"body")
    try:
        for piece in [SETTINGS, *pieces] if with_settings else pieces:
            session.receive(piece)
    except ConnectionFailed:
        pass
    session.sent()


LIMIT = 64
FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=LIMIT))
)


def split(content: bytes, given: st.DataObject) -> Iterator[bytes]:
    """Returns the content in any pieces."""
    cuts = sorted(given.draw(st.lists(st.integers(0, len(content)), max_size=12)))
    return (content[start:end] for start, end in pairwise([0, *cuts, len(content)]))


@given(FRAMES, st.data())
def test_frames_do_not_depend_on_the_split(sent: list[Frame], given: st.DataObject) -> None:
    content = b"".join(frame_bytes(frame.kind, frame.flags, frame.stream_id, frame.content) for frame in sent)
    buffer = FrameBuffer(LIMIT)
    assert [frame for piece in split(content, given) for frame in buffer.frames(piece)] == sent


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    data = bytearray(frame_bytes(0, 0, 1))
    data[5] |= 0x80
    assert [frame.stream_id for frame in FrameBuffer(LIMIT).frames(bytes(data))] == [1]


MESSAGES = st.lists(st.binary(max_size=LIMIT), max_size=6)


@given(MESSAGES, st.data())
def test_messages_do_not_depend_on_the_split(messages: list[bytes], given: st.DataObject) -> None:
    reader = MessageReader(LIMIT)
    pieces = split(b"".join(map(message, messages)), given)
    assert [found for piece in pieces for found in reader.messages(piece)] == messages
    assert reader.is_between_messages
    assert reader.missing == PREFIX_BYTES


def test_the_prefix_gives_the_number_of_missing_bytes() -> None:
    reader = MessageReader(LIMIT)
    for piece, missing in ((b"\0\0", 3), (b"\0\0\x0a", 10), (b"", 10), (b"1234", 6)):
        assert list(reader.messages(piece)) == []
        assert (reader.missing, reader.is_between_messages) == (missing, False)


@pytest.mark.parametrize("prefix", [b"\x01\0\0\0\x01x", b"\0\0\0\0\x41"])
def test_messages_before_an_invalid_message_are_returned(prefix: bytes) -> None:
    messages = MessageReader(LIMIT).messages(message(b"good") + prefix)
    assert next(messages) == b"good"
    with pytest.raises(RpcError):
        next(messages)
