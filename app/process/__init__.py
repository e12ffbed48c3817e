"""The running process: sockets, servers, background tasks, signals and the drain.

Only `app/cli.py` imports from here. Begin with `serving.py`, then `gateway.py` and `tritons.py`.
"""
