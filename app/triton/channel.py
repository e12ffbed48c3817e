"""The gRPC channel to Triton and its options."""

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Limit of a request, and of a response: no model can fill the gateway's memory with one message."""

RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""gRPC's default backoff grows to two minutes, so the gateway would notice the return of Triton late."""

SIZE_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

WINDOW_OPTIONS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16 * 1024),
)
"""How much of a response gRPC prefetches. By default this grows to megabytes for each stream."""

PATIENT_PING_OPTIONS = (("grpc.keepalive_time_ms", 300_000),)
"""A server with default settings closes a connection (GOAWAY) that pings more often."""

TIGHT_PING_OPTIONS = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Notices a stopped server within seconds. Only for a Triton that was started to allow them: the embedded Triton."""


def open_channel(url: str, *, tight_pings: bool = False) -> grpc.aio.Channel:
    """``url``: ``host:port`` or ``unix:/path``; nothing is sent before the first call."""
    pings = TIGHT_PING_OPTIONS if tight_pings else PATIENT_PING_OPTIONS
    return grpc.aio.insecure_channel(url, options=[*RECONNECT_OPTIONS, *SIZE_OPTIONS, *WINDOW_OPTIONS, *pings])
