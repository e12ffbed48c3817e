"""A client for ``/v1/streams``."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.toolkit.events import Event, checked, events_in, lines_of
from tests.toolkit.processes import GatewayProcess


def start(gateway: GatewayProcess, pipeline: str = "scripted_patient", **script: Any) -> str:
    """Starts a stream and returns its path."""
    body = {"pipeline": pipeline, "inputs": {"script": json.dumps(script)}}
    answer = httpx.post(f"{gateway.url}/v1/streams", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.headers["location"])


def ask(gateway: GatewayProcess, path: str, after: int | str | None = None) -> httpx.Response:
    """Returns the complete answer to GET."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    return httpx.get(gateway.url + path, headers=headers, timeout=30)


@contextmanager
def reading(gateway: GatewayProcess, path: str, after: int = 0) -> Iterator[Iterator[Event]]:
    """Yields the events of a connection as they arrive. Leaving the block early drops the connection."""
    with httpx.stream("GET", gateway.url + path, headers={"Last-Event-ID": str(after)}, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        yield events_in(lines_of(answer))


def read_all(gateway: GatewayProcess, path: str, after: int = 0) -> list[Event]:
    with reading(gateway, path, after) as events:
        return checked(list(events), after + 1)


def read_some(gateway: GatewayProcess, path: str, count: int, after: int = 0) -> list[Event]:
    """Reads ``count`` events, then drops the connection."""
    with reading(gateway, path, after) as events:
        return [next(events) for _ in range(count)]


def status(gateway: GatewayProcess, path: str) -> int:
    """Returns the status of GET, without reading the body."""
    with httpx.stream("GET", gateway.url + path, timeout=30) as answer:
        return answer.status_code


def delete(gateway: GatewayProcess, path: str) -> int:
    return httpx.delete(gateway.url + path, timeout=30).status_code
