"""Parses Server-Sent Events according to the standard, and checks the guarantees of the gateway."""

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Event:
    id: int
    name: str
    data: dict[str, Any]


def parsed(text: str) -> list[Event]:
    return list(events_in(text.split("\n")))


def events_in(lines: Iterable[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name:
                assert name not in fields, f"an event has the field {name} twice"
                fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield Event(int(fields["id"]), fields["event"], json.loads(fields["data"]))
            fields = {}
        else:
            fields = {}


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """Splits the body only at line feeds; ``iter_lines`` of httpx also splits at U+2028 and similar characters."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    for chunk in answer.iter_bytes():
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        yield from lines
    assert not rest, "the stream ended within a line"


def read_stream(client: httpx.Client, pipeline: str, body: dict[str, Any], **options: Any) -> list[Event]:
    """Returns all events of a stream after checking the guarantees of every stream."""
    with client.stream("POST", f"/v1/pipelines/{pipeline}/stream", json=body, **options) as answer:
        assert answer.status_code == 200, answer.read()
        events = list(events_in(lines_of(answer)))
    return checked(events)


def checked(events: list[Event], first_id: int = 1) -> list[Event]:
    """Checks that the ids have no gaps and that the last event is the only terminal event."""
    assert [event.id for event in events] == list(range(first_id, first_id + len(events)))
    assert [event.name for event in events[:-1]] == ["output"] * (len(events) - 1)
    assert events[-1].name in {"done", "error"}
    return events
