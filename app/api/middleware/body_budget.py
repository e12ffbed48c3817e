"""Counts the bytes of a request's body as they arrive, until the request ends."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.budget import ByteBudget


class BodyBudgetMiddleware:
    """``receive`` raises TooManyRequests for the bytes that the budget has no room for."""

    def __init__(self, app: ASGIApp, budget: ByteBudget) -> None:
        self.app = app
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with self.budget.share() as share:

            async def receive_counted() -> Message:
                message = await receive()
                share.take(len(message.get("body", b"")))
                return message

            await self.app(scope, receive_counted, send)
