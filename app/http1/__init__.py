"""HTTP/1.1 on one connection: heads, bodies, one answer at a time, and the end of the connection (decision 3).

It extends uvicorn's protocol, and imports only `app.core`. Begin with `README.md` and `protocol.py`.
"""
