"""What the live tests use by name; the fixtures themselves are every test's, in tests/conftest.py."""

from tests.processes import (
    GatewayProcess,
    StartGateway,
    free_ports,
    running_gateway,
    running_triton,
    scripted_models,
    wait_until_ready,
)

__all__ = [
    "GatewayProcess",
    "StartGateway",
    "free_ports",
    "running_gateway",
    "running_triton",
    "scripted_models",
    "wait_until_ready",
]
