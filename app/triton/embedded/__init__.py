"""Starts, watches and cleans up an embedded Triton: the `tritonserver` of the wheel `nvidia-pytriton`.

Import `server.py`; `guard.py` runs as a process of its own and imports nothing of the gateway. Begin with `server.py`.
"""
