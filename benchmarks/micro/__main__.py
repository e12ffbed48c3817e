"""The same as `python -m benchmarks micro`."""

import sys

import uvloop

from benchmarks.micro.run import run
from benchmarks.surroundings import surroundings

ROUNDS = 40

if __name__ == "__main__":
    sys.stdout.write(f"{surroundings()}\n\n" + "\n".join(map(str, uvloop.run(run(ROUNDS)))))
