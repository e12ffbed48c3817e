"""Prints the results of a client's calls as JSON: the returned value or the raised error."""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as exc:
        return error_of(exc)


async def async_outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except Exception as exc:
        return error_of(exc)


def error_of(error: Exception) -> dict[str, Any]:
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return {"error": type(error).__name__, "status": status, "message": str(error)}


def show(outcomes: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(outcomes)}\n")
    sys.stdout.flush()
