"""A gRPC client over HTTP/2: a core without I/O, and a client on asyncio. It imports nothing of the gateway.

Begin with `README.md` and `client.py`; a call then passes `connection.py` and `http2_session.py`.
"""
