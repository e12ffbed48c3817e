"""`python -m benchmarks.tritons.named FILE serve ...`: the gateway; its DNS name has the addresses that FILE lists."""

import sys
from pathlib import Path

from app import cli
from app.triton.fleet import pool


def main() -> int:
    file = Path(sys.argv[1])

    async def resolve(_host: str, _port: int) -> list[str]:
        return file.read_text().split()  # noqa: ASYNC240 - a few bytes

    pool.resolve = resolve
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
