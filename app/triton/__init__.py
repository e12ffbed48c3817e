"""The engine over gRPC: the only place that knows grpc and tritonclient."""
