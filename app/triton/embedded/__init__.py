"""Starts, watches and cleans up an embedded Triton: the `tritonserver` of the wheel `nvidia-pytriton`."""
