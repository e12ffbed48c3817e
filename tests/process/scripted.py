"""A gateway that a script changes before it starts, as a fork (``tests/forked_gateway.py``)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked_gateway import ForkedGateway
from tests.processes import START_S, GatewayProcess, free_ports

WITHOUT_TRITON = {"triton_url": "127.0.0.1:1", "drain_s": "0"}


@contextmanager
def scripted_gateway(folder: Path, script: str, **settings: str) -> Iterator[GatewayProcess]:
    """``settings`` are names of ``app.settings``. The script calls the command line with ``serve``."""
    port, admin_port = free_ports(2)
    named = {"port": str(port), "admin_port": str(admin_port)} | WITHOUT_TRITON | settings
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    environment |= {f"GATEWAY_{name.upper()}": value for name, value in named.items()}
    log_path = folder / "log"
    log_path.touch()
    process = ForkedGateway(environment, folder, log_path, script)
    try:
        yield GatewayProcess(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", log_path)
    finally:
        process.terminate()
        process.wait(START_S)
