"""`python -m benchmarks.instant serve ...`: the gateway with an engine that answers at once instead of Triton."""

import sys

from app import cli
from app.process import tritons, workers
from app.triton.triton_engine import RunningStream
from benchmarks.micro.gateway import IdentityEngine


class InstantEngine(IdentityEngine):
    """Accepts the arguments of ``TritonEngine``, and has one model, ``identity``."""

    def __init__(self, *_: object) -> None:
        self.streams: set[RunningStream] = set()

    async def close(self) -> None:
        pass


def main() -> int:
    tritons.TritonEngine = InstantEngine  # type: ignore[assignment,misc]
    workers.COMMAND = (sys.executable, "-m", "benchmarks.instant", "worker")
    return workers.main() if sys.argv[1:] == ["worker"] else cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
