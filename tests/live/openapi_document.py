"""Writes ``openapi.json`` of the reference pipelines from a running gateway with API keys; `make openapi` calls it."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from app.launcher.launch import EmbeddedOptions
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.processes import running_gateway, running_triton

ROOT = Path(__file__).parents[2]
CHECKED_IN = ROOT / "openapi.json"


def document_at(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json", headers=headers).raise_for_status().json()
    return document


def settings_in(folder: Path) -> dict[str, str]:
    """The settings of a gateway with the reference pipelines and a key without limits, ``everything``."""
    return {
        "config": str(ROOT / "gateway.yaml"),
        "api_keys_file": str(write_keys(folder / "keys.yaml", entry("everything"))),
    }


def write() -> None:
    """Starts Triton with the reference models and a gateway, and writes the document of the gateway."""
    with running_triton(EmbeddedOptions(ROOT / "triton_models", ROOT / ".venv-triton")) as triton:
        folder = Path(tempfile.mkdtemp())
        with running_gateway(folder, triton_url=triton.grpc_url, **settings_in(folder)) as gateway:
            document = document_at(gateway.url, bearer("everything"))
            CHECKED_IN.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
