"""Sends the same request to the HTTP endpoint of Triton and to the gateway, and returns both answers."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from app.core.inference import DTYPE_BY_DATATYPE

HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Both:
    triton: httpx.Client
    gateway: httpx.Client

    def post(self, path: str, body: bytes, **headers: str) -> tuple[httpx.Response, httpx.Response]:
        with_hyphens = {name.replace("_", "-"): value for name, value in headers.items()}
        of_triton = self.triton.post(path, content=body, headers=with_hyphens)
        return of_triton, self.gateway.post(path, content=body, headers=with_hyphens)

    def get(self, path: str) -> tuple[httpx.Response, httpx.Response]:
        return self.triton.get(path), self.gateway.get(path)


@contextmanager
def both_at(triton_url: str, gateway_url: str) -> Iterator[Both]:
    plain = {"Accept-Encoding": "identity"}
    with (
        httpx.Client(base_url=triton_url, headers=plain, timeout=30) as triton,
        httpx.Client(base_url=gateway_url, headers=plain, timeout=30) as gateway,
    ):
        yield Both(triton, gateway)


@dataclass(frozen=True)
class Answer:
    """An answer to an inference request.

    Attributes:
        frame: the JSON without the outputs.
        tensors: name -> datatype, shape, and the elements or, for a binary tensor, its bytes.
    """

    frame: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], Any]] = field(default_factory=dict)


def answer_of(response: httpx.Response) -> Answer:
    json_bytes = int(response.headers.get(HEADER, len(response.content)))
    frame, rest = json.loads(response.content[:json_bytes]), response.content[json_bytes:]
    tensors = {}
    for output in frame.pop("outputs"):
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            elements: Any = typed(output["datatype"], output["data"])
        else:
            elements, rest = rest[:size], rest[size:]
        tensors[output["name"]] = (output["datatype"], output["shape"], elements)
    assert not rest
    return Answer(frame, tensors)


def typed(datatype: str, data: list[Any]) -> Any:
    """Converts JSON numbers to ``datatype``.

    Triton writes an FP32 with the digits of a double; the gateway writes the shortest digits that give the same FP32.
    """
    return data if datatype == "BYTES" else np.array(data, DTYPE_BY_DATATYPE[datatype]).tolist()


def with_binary(request: dict[str, Any], *raws: bytes) -> tuple[bytes, dict[str, str]]:
    """Returns a body with binary tensors after the JSON, and its headers."""
    head = json.dumps(request).encode()
    return b"".join((head, *raws)), {HEADER: str(len(head))}


def raw_texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def triton_text(triton_url: str, prompt: str) -> dict[str, Any]:
    """Returns the text that `text_generate` writes after a prompt, and the token counts of prompt and text."""
    body = {"PROMPT": prompt, "max_tokens": 24, "seed": 7, "temperature": 0.8}
    answer = httpx.post(f"{triton_url}/v2/models/text_generate/generate_stream", json=body, timeout=30)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    return {
        "text": "".join(event["TEXT"] for event in events),
        "prompt": events[0]["PROMPT_TOKENS"],
        "completion": sum(np.size(event["TOKEN_ID"]) for event in events),
    }


def triton_vectors(triton_url: str, *texts: str) -> list[list[float]]:
    """Returns the vectors that `text_embed` computes."""
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    answer = httpx.post(f"{triton_url}/v2/models/text_embed/infer", json={"inputs": [tensor]}, timeout=30)
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    return np.float32(outputs["EMBEDDING"]["data"]).reshape(outputs["EMBEDDING"]["shape"]).tolist()
