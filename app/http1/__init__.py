"""HTTP/1.1 on one connection: heads, bodies, one answer at a time, and the end of the connection (decision 3).

`app/process` imports `protocol.py` and gives it to uvicorn, whose protocol it extends. Begin with `protocol.py`.
"""
