"""Load from a process of its own, the same for every peer: HTTP over raw sockets, or gRPC as a bare client.

    python -m benchmarks.load http|grpc HOST:PORT DESCRIPTOR

The process takes orders (``orders.py``) from the benchmark over an inherited pipe, one at a time.
"""
