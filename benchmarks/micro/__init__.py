"""What one request and its parts cost in CPU time, in one process: no socket, no Triton."""
