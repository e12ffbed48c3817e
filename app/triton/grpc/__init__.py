"""A gRPC client over HTTP/2 for the methods that the gateway calls: a core without I/O, and a client on asyncio."""
