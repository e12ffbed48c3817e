"""A Triton of the gateway's own: the `tritonserver` of the wheel `nvidia-pytriton`, started, watched and cleaned up."""
