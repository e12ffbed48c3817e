"""HTTP/1.1 on one connection: heads, bodies, one answer at a time, and the end of the connection."""
