"""Noticing that the client went away while its answer is being made."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive

from app.domain.errors import ClientClosedRequest


@asynccontextmanager
async def given_up_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the work inside when the client goes away; it comes out as ClientClosedRequest.

    The body must have been read: from then on ``receive`` says nothing but that the client is gone.
    """
    work = asyncio.current_task()
    assert work is not None
    gone = False

    def give_up(watch: asyncio.Task[Message]) -> None:
        nonlocal gone
        if not watch.cancelled() and not watch.exception() and watch.result()["type"] == "http.disconnect":
            gone = True
            work.cancel()

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(give_up)
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        work.uncancel()
        raise ClientClosedRequest("The client went away before its answer was made.") from None
    finally:
        watch.remove_done_callback(give_up)
        watch.cancel()
