"""Formats a stream's events as Server-Sent Events, with sse-starlette.

Source: WHATWG HTML, "Server-sent events". Model output is JSON text on one line, never a dict: sse-starlette turns the
keys of a dict into the fields of an event.
"""

from typing import get_args

from sse_starlette import ServerSentEvent

from app.streams.event import Event, EventName

PING = ServerSentEvent(comment="", sep="\n").encode()
"""A heartbeat comment, which readers ignore."""
RETRY = ServerSentEvent(retry=1000, sep="\n").encode()
"""The delay in milliseconds before a browser's EventSource reconnects."""

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "Cache-Control": "no-store, no-transform",
    "X-Accel-Buffering": "no",
}
"""Keep proxies from storing, compressing and buffering the stream."""


_FRAMES = {name: ServerSentEvent("%b", event=name, id="%d", sep="\n").encode() for name in get_args(EventName)}
"""A frame for each event name, with placeholders for the id and the data."""


def frame_of(event: Event) -> bytes:
    return _FRAMES[event.name] % (event.id, event.data)
