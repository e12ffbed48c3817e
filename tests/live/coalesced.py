"""Models whose answers prove whose they are, a gateway that lets requests to them share calls, and many clients."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.toolkit.listener import read_answer
from tests.toolkit.processes import GatewayProcess, configured_gateway, running_triton
from tests.toolkit.raw_http import post

BAD, KILLER = 13, 666
"""Items of ``rows_model.py`` with a meaning: the model fails, and its process ends."""
HERE = Path(__file__).parent
CONFIG = """
backend: "python"
max_batch_size: 64
input [ { name: "ITEM" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [
  { name: "NEGATIVE" data_type: TYPE_INT64 dims: [ 1 ] },
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
SHARED = {"idempotent": True, "coalesce": True}
PIPELINES = {
    "good": {
        "model": "good",
        "inputs": {"item": {"tensor": "ITEM"}},
        "outputs": {"negative": {"tensor": "NEGATIVE"}, "text": {"tensor": "TEXT", "kind": "text"}},
        "sample": {"item": 3},
        **SHARED,
    },
}


def write_models(folder: Path) -> None:
    (folder / "good" / "1").mkdir(parents=True)
    (folder / "good" / "config.pbtxt").write_text(CONFIG)
    (folder / "good" / "1" / "model.py").symlink_to(HERE / "rows_model.py")


def config_text() -> str:
    return yaml.safe_dump({"pipelines": PIPELINES})


@contextmanager
def rows_triton(folder: Path, models_venv: Path) -> Iterator[EmbeddedTriton]:
    write_models(folder)
    with running_triton(EmbeddedOptions(folder, models_venv)) as triton:
        yield triton


@contextmanager
def rows_gateway(
    triton: EmbeddedTriton, folder: Path, *, workers: str = "2", repair: str = "true", **more: str
) -> Iterator[GatewayProcess]:
    """``more``: further settings."""
    settings = {"triton_repair": repair, "workers": workers, **more}
    with configured_gateway(triton, folder, config_text(), **settings) as gateway:
        yield gateway


@dataclass
class Answers:
    right: int = 0
    others: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Status -> items and statuses of the answers that were not 200."""
    wrong: list[tuple[int, bytes]] = field(default_factory=list)
    """Answers to an item that are those of another."""

    @property
    def failed(self) -> set[int]:
        return {item for found in self.others.values() for item, _ in found}


async def ask(url: str, pipeline: str, items: Iterable[int], connections: int) -> Answers:
    """Each item once, over so many connections. A busy machine refuses some with 429: these are sent again."""
    address = urlsplit(url)
    waiting, answers = iter(items), Answers()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        again = list[int]()
        while (item := again.pop() if again else next(waiting, None)) is not None:
            writer.write(post(f"/v1/pipelines/{pipeline}", {"item": item}))
            head, answer = await read_answer(reader)
            status = int(head[9:12])
            if status == 429:
                again.append(item)
                await asyncio.sleep(0.2)
            elif status != 200:
                answers.others.setdefault(status, []).append((item, status))
            elif json.loads(answer) == {"negative": -item, "text": f"of {item}"}:
                answers.right += 1
            else:
                answers.wrong.append((item, answer))
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return answers
