"""Re-exports the processes that the live tests use. The shared fixtures are in tests/conftest.py."""

from tests.toolkit.processes import (
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
