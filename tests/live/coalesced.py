"""A model whose answers prove whose they are, and a gateway.yaml that lets requests to it share calls."""

from pathlib import Path

import yaml

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
