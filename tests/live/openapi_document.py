"""Writes ``openapi.json`` of the reference pipelines from a running gateway; `make openapi` calls it."""

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from app.triton.embedded.options import EmbeddedOptions
from tests.live.conftest import running_gateway, running_triton

ROOT = Path(__file__).parents[2]
CHECKED_IN = ROOT / "openapi.json"


def document_at(url: str) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json").raise_for_status().json()
    return document


def write() -> None:
    """Starts Triton with the reference models and a gateway, and writes the document of the gateway."""
    with running_triton(EmbeddedOptions(ROOT / "triton_models", ROOT / ".venv-triton")) as triton:
        folder = Path(tempfile.mkdtemp())
        with running_gateway(folder, triton_url=triton.grpc_url, config=str(ROOT / "gateway.yaml")) as gateway:
            CHECKED_IN.write_text(json.dumps(document_at(gateway.url), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
