"""The peers, in the order of tables and charts. To add a peer, add a module to this package and its name here."""

from collections.abc import Mapping

from benchmarks.peers import (
    gateway,
    gateway_2_workers,
    gateway_v2,
    gateway_wire,
    grpc_client,
    grpc_shared_memory,
    kserve_transformer,
    plain_fastapi,
    receiving,
    triton_http,
)
from benchmarks.peers.peer import Start

PEERS: Mapping[str, Start] = {
    module.NAME: module.start
    for module in (
        gateway,
        gateway_2_workers,
        gateway_v2,
        gateway_wire,
        plain_fastapi,
        kserve_transformer,
        triton_http,
        grpc_client,
        grpc_shared_memory,
        receiving,
    )
}
STREAMING = (gateway.NAME, plain_fastapi.NAME, grpc_client.NAME)
"""The peers whose idle streams are measured."""
