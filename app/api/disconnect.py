"""Notices a client that disconnects while its response is being made."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive

from app.domain.errors import ClientClosedRequest


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects, and raises ClientClosedRequest.

    The body must have been read: after it, ``receive`` returns only when the client disconnects.
    """
    work = asyncio.current_task()
    assert work is not None
    gone = False

    def cancel_work(watch: asyncio.Task[Message]) -> None:
        nonlocal gone
        if not watch.cancelled() and not watch.exception() and watch.result()["type"] == "http.disconnect":
            gone = True
            work.cancel()

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(cancel_work)
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        work.uncancel()
        raise ClientClosedRequest("The client went away before its answer was made.") from None
    finally:
        watch.remove_done_callback(cancel_work)
        watch.cancel()
