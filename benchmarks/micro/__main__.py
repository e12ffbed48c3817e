"""Writes the CPU times of one small POST as JSON, for a run of `micro` with another interpreter."""

import json
import sys

import uvloop

from benchmarks.micro.run import measured
from benchmarks.surroundings import interpreter

if __name__ == "__main__":
    requests, _ = uvloop.run(measured(int(sys.argv[1])))
    found = {name: each.seconds for name, each in requests.items()}
    sys.stdout.write(json.dumps({"interpreter": interpreter(), "seconds": found}))
