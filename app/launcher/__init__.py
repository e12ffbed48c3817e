"""Starts, watches and cleans up an embedded Triton: the `tritonserver` of the wheel `nvidia-pytriton`.

Begin with `README.md` and `embedded_triton.py`. `guard.py` runs as a process of its own.
"""
