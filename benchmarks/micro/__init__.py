"""The CPU time of one request and its parts, in one process, without sockets and Triton."""
