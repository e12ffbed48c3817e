"""A gateway that may load the models of a Triton again, or may not."""

from contextlib import AbstractContextManager
from pathlib import Path

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.processes import GatewayProcess, running_gateway


def repairing_gateway(
    triton: EmbeddedTriton, folder: Path, config: str, *, repair: str, workers: str = "1", **more: str
) -> AbstractContextManager[GatewayProcess]:
    """``config``: the text of gateway.yaml. ``repair``: of ``GATEWAY_TRITON_REPAIR``. ``more``: further settings."""
    (folder / "gateway.yaml").write_text(config)
    settings = {"config": str(folder / "gateway.yaml"), "triton_repair": repair, "workers": workers, **more}
    return running_gateway(folder / "gateway", triton_url=triton.grpc_url, **settings)
