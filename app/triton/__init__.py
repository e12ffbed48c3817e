"""The engine over gRPC: the only package that imports grpc and tritonclient."""
