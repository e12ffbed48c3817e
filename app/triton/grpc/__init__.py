"""A gRPC client over HTTP/2 for the methods that the gateway calls: a core without I/O, and a client on asyncio.

Import it through `app/triton/transports.py` only. Begin with `client.py`; a call then passes `calls.py`,
`connection.py` and `session.py`.
"""
