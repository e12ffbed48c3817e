"""`python -m benchmarks.instant serve ...`: the gateway with an engine that answers at once instead of Triton."""

import sys

from app import cli
from app.process import servers
from app.process.workers import process
from app.triton.running import RunningStream
from benchmarks.micro.gateway import IdentityEngine


class InstantEngine(IdentityEngine):
    """Accepts the arguments of ``DirectEngine``, and has one model, ``identity``."""

    def __init__(self, *_: object) -> None:
        self.streams: set[RunningStream] = set()

    async def close(self) -> None:
        pass


def main() -> int:
    servers.DirectEngine = InstantEngine  # type: ignore[assignment,misc]
    process.COMMAND = (sys.executable, "-m", "benchmarks.instant", "worker")
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
