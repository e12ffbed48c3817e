"""Starts, watches and cleans up an embedded Triton: the `tritonserver` of the wheel `nvidia-pytriton`.

Begin with `README.md` and `server.py`. `guard.py` runs as a process of its own.
"""
