"""The running process: sockets, servers, background tasks, signals and the drain."""
