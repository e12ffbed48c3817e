"""Programs that use one client, each run in an environment of its own."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.triton.embedded.server import EmbeddedTriton

PROGRAMS = Path(__file__).parent / "programs"

Outcomes = dict[str, Any]
RunProgram = Callable[..., Outcomes]

QUESTION = "User: What is a list?\nAssistant:"
"""The question of the programs by the chat template of `write`."""


def error_of(outcome: Any) -> tuple[str, int | None]:
    """Class and status of the error that a client raised."""
    return outcome["error"], outcome["status"]


@pytest.fixture(scope="session")
def run_program() -> RunProgram:
    """``run_program(interpreter, "kserve_calls.py", url)``: what the program prints, as a value."""

    def run(interpreter: Path, program: str, *arguments: str | Path) -> Outcomes:
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(
            [str(word) for word in (interpreter, program, *arguments)],
            cwd=PROGRAMS,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outcomes: Outcomes = json.loads(done.stdout.splitlines()[-1])
        return outcomes

    return run


def triton_text(triton: EmbeddedTriton, prompt: str) -> dict[str, Any]:
    """What Triton itself answers to the wishes of the programs, and its tokens."""
    body = {"PROMPT": prompt, "max_tokens": 24, "seed": 7, "temperature": 0.8}
    answer = httpx.post(f"{triton.http_url}/v2/models/text_generate/generate_stream", json=body, timeout=30)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    return {
        "text": "".join(event["TEXT"] for event in events),
        "prompt": events[0]["PROMPT_TOKENS"],
        "completion": sum(np.size(event["TOKEN_ID"]) for event in events),
    }


def triton_vectors(triton: EmbeddedTriton, *texts: str) -> list[list[float]]:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    answer = httpx.post(f"{triton.http_url}/v2/models/text_embed/infer", json={"inputs": [tensor]}, timeout=30)
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    return np.float32(outputs["EMBEDDING"]["data"]).reshape(outputs["EMBEDDING"]["shape"]).tolist()


def as_float32(vectors: list[list[float]]) -> list[list[float]]:
    """The gateway writes the shortest decimals of an FP32, Triton those of the same number as a double."""
    return np.float32(vectors).tolist()
