"""Fakes at two interfaces: the engine's protocol and Triton's gRPC API."""
