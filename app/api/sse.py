"""A stream's events in the format of Server-Sent Events.

Source: WHATWG HTML, "Server-sent events". Data is JSON on one line, so nothing in a model's text can end a field.
"""

from app.streams.event import Event

PING = b":\n\n"
RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a browser's EventSource connects again."""

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "Cache-Control": "no-store, no-transform",
    "X-Accel-Buffering": "no",
}
"""Keep proxies from storing, compressing and buffering the stream."""


def frame_of(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.name.encode(), event.data)
