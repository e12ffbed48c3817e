"""What tests start and share: the only place that starts Tritons, gateways, clients and other programs.

Fakes stand at two interfaces: the port to an engine, and Triton's gRPC API.
"""
