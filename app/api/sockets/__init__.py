"""WebSockets: each text or binary message of a client is a request, and the events of its answer are text messages.

Begin with `socket.py`, which runs one WebSocket. `handshake.py` checks the request that opens it, `websocket.py` has
the interface of the connection, which `app.http1.websocket` implements. A dialect says what a message runs.
"""
