"""What the parts of one small request cost in CPU time, in one process and without sockets."""
