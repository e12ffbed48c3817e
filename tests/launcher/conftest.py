"""A tiny model repository, and the processes and files of a running Triton."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc.aio as client

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from app.triton.repository import served_repository
from tests.toolkit.processes import EXIT_S
from tests.toolkit.waiting import PATIENCE_S

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
"""

MODEL = """
import time
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        x = pb.get_input_tensor_by_name(requests[0], "X").as_numpy()
        end = time.monotonic() + float(x[0])
        while time.monotonic() < end:  # busy, like a generator
            pass
        return [pb.InferenceResponse([pb.Tensor("Y", x)])]
"""


@dataclass(frozen=True)
class Traces:
    """The processes and files of one start of Triton, found by the unique prefix of its shared memory."""

    prefix: str
    folder: Path

    @classmethod
    def of(cls, pid: int) -> "Traces":
        options = dict(each.rpartition("=")[::2] for each in psutil.Process(pid).cmdline())
        return cls(options["--backend-config=python,shm-region-prefix-name"], Path(options["--backend-directory"]))

    def processes(self) -> list[psutil.Process]:
        return [
            each for each in psutil.process_iter(["cmdline"]) if self.prefix in " ".join(each.info["cmdline"] or ())
        ]

    def named(self, word: str) -> psutil.Process:
        return next(each for each in self.processes() if word in " ".join(each.cmdline()[:4]))

    def regions(self) -> list[Path]:
        return list(Path("/dev/shm").glob(self.prefix + "*"))

    def are_gone(self) -> bool:
        return not self.processes() and not self.regions() and not self.folder.exists()


def write_model(models: Path, name: str = "ident", *, initialize: str = "pass") -> None:
    version = models / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL.format(initialize=initialize))
    (version.parent / "config.pbtxt").write_text(CONFIG)


@pytest.fixture
def add_model(tmp_path):
    return partial(write_model, tmp_path / "models")


@pytest.fixture
def options(tmp_path, models_venv):
    """Of a Triton that waits a second at most for its models when it ends."""
    write_model(tmp_path / "models")
    return EmbeddedOptions(
        tmp_path / "models", models_venv, first_restart_s=0.1, exit_timeout_s=EXIT_S, read=served_repository
    )


async def infer(url: str, busy_s: float = 0.0) -> float:
    """Calls the model, which is busy for the given time and returns the time."""
    async with client.InferenceServerClient(url) as server:
        x = client.InferInput("X", [1], "FP32")
        x.set_data_from_numpy(np.array([busy_s], np.float32))
        return float((await server.infer("ident", [x])).as_numpy("Y")[0])


@asynccontextmanager
async def busy(url: str) -> AsyncIterator[None]:
    """Keeps the model busy for longer than the block."""
    call = asyncio.ensure_future(infer(url, 600.0))
    await asyncio.sleep(0.5)
    yield
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def until_answered(triton: EmbeddedTriton, *, replaces: int | None = None) -> None:
    """Waits until the model answers and the start has ended, after which a restart has an effect.

    ``replaces``: the process id of an earlier Triton, which does not count.
    """
    async with asyncio.timeout(PATIENCE_S):
        while triton.pid == replaces or not await _answers(triton.grpc_url) or triton.is_starting:
            await asyncio.sleep(0.05)


async def _answers(url: str) -> bool:
    try:
        await infer(url)
    except Exception:
        return False
    return True
