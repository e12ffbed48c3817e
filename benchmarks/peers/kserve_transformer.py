"""A KServe transformer with KServe's defaults and gRPC to Triton: `kserve_app.py` in a separate environment."""

import base64
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.load.orders import HttpAsk
from benchmarks.peers.contents import FILE, LARGE, SMALL, json_of
from benchmarks.peers.peer import Asks, Peer, serving
from benchmarks.peers.triton_http import numbers_ask
from benchmarks.stage import Triton
from deploy.tool_environment import tool_environment

NAME = "KServe transformer"


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    def command(port: int) -> list[str]:
        app = [str(tool_environment("kserve") / "python3"), str(Path(__file__).with_name("kserve_app.py"))]
        address = ["--http_port", str(port), "--enable_grpc", "false"]
        return [*app, *address, "--predictor_protocol", "grpc-v2", "--predictor_host", triton.grpc_url]

    return serving(NAME, command, "/v2/models/bench_identity/ready", asks(), folder)


def asks() -> Asks:
    """The image is base64 in KServe's first protocol, as KServe's documentation sends one."""
    image = {"image": {"b64": base64.b64encode(FILE).decode()}}
    return {
        "small": numbers_ask(SMALL),
        "large": numbers_ask(LARGE),
        "file": HttpAsk("/v1/models/bench_file:predict", json_of(instances=[image])),
    }
