"""Pure ASGI middleware, one class a file."""
