"""Messages between a supervisor and a worker."""

import socket
from pathlib import Path

import pytest

from app.admission.keys import ANYONE, Key, Keyring
from app.observability.worker_metrics import Descriptors
from app.pipelines.file import read_gateway_file
from app.process.tritons import Triton, WorkerPart
from app.process.workers.channel import Channel, Report, WorkerConfig, WorkerUpdate
from app.settings import Settings
from app.triton.health.health import Faults, Observed, Seen

FILE = "pipelines: {p: {model: m, outputs: {y: {tensor: Y}}, stream: true, contract: {Y: {max_items: 4}}}}"


async def opened() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return await Channel.open(ours), await Channel.open(theirs)


async def test_messages_arrive_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(FILE)
    triton = Triton(
        "127.0.0.1:1",
        None,
        allows_fast_pings=True,
        part=WorkerPart(2, read_gateway_file(path), Keyring((Key(ANYONE, (b"1",)),))),
    )
    order = WorkerConfig(1, Settings(workers=2, config=path), triton, 8081, [3, 4], Descriptors(5, 6), 7, 8)
    seen = Observed(Seen({"ModelInfer": 1}, {}, {"m": 0.5}), {"m": {"m": 2}})
    report = Report(is_ready=True, observed={"127.0.0.1:1": seen})
    supervisor, worker = await opened()
    for message in (order, WorkerUpdate(frozenset({1, 2}), {"127.0.0.1:1": Faults(("m",), is_stuck=True)})):
        supervisor.send(message)
        assert await worker.receive() == message
    worker.send(report)
    assert await supervisor.receive() == report
    supervisor.close()
    worker.close()


async def test_the_end_of_the_other_process_raises_eof_error() -> None:
    supervisor, worker = await opened()
    worker.send("last")
    worker.close()
    assert await supervisor.receive() == "last"
    with pytest.raises(EOFError):
        await supervisor.receive()
    supervisor.send("nobody reads this")
    supervisor.close()
