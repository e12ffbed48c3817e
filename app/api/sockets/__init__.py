"""WebSockets: each text or binary message of a client is a request, and the events of its answer are text messages.

Begin with `socket.py`, which runs one WebSocket. `handshake.py` checks the request that opens it,
`app.http1.websocket` has its connection. A dialect says what a message runs.
"""
