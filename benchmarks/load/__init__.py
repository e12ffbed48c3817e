"""Sends load from a separate process, the same for every server: HTTP over raw sockets, or a bare gRPC client."""
