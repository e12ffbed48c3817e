"""A stream's events in the format of Server-Sent Events, by sse-starlette.

Source: WHATWG HTML, "Server-sent events". Model output is JSON text on one line, never a dict: sse-starlette turns the
keys of a dict into the fields of an event.
"""

from typing import get_args

from sse_starlette import ServerSentEvent

from app.streams.event import Event, EventName

PING = ServerSentEvent(comment="", sep="\n").encode()
"""A comment line, which readers skip."""
RETRY = ServerSentEvent(retry=1000, sep="\n").encode()
"""Milliseconds after which a browser's EventSource connects again."""

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "Cache-Control": "no-store, no-transform",
    "X-Accel-Buffering": "no",
}
"""Keep proxies from storing, compressing and buffering the stream."""


_FRAMES = {name: ServerSentEvent("%b", event=name, id="%d", sep="\n").encode() for name in get_args(EventName)}
"""A frame of each name, with the places of the id and the data."""


def frame_of(event: Event) -> bytes:
    return _FRAMES[event.name] % (event.id, event.data)
