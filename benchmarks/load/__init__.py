"""Sends load from a separate process, the same for every peer: HTTP over raw sockets, or a bare gRPC client.

    python -m benchmarks.load http|grpc HOST:PORT DESCRIPTOR

The process receives orders (``orders.py``) from the benchmark over an inherited pipe, one at a time.
"""
