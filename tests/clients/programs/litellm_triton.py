"""The calls of LiteLLM's provider `triton`. Arguments: base URL, file that a cancelled model writes."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from outcomes import left, outcome, show, slow_script

URL, NOTICE = sys.argv[1], Path(sys.argv[2])
EMOJI = ["61", "f0", "9f", "98", "80", "62"]
"""In hexadecimal: a letter, an emoji in four pieces, a letter."""


def arguments(text: str, path: str = "litellm_text/generate", **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    base = f"{URL}/v2/models/{path}"
    return {
        "model": "triton/any",
        "api_base": base,
        "messages": messages,
        "num_retries": 0,
        "max_retries": 0,
        **options,
    }


def text(script: dict[str, Any], **options: Any) -> str:
    return str(litellm.completion(**arguments(json.dumps(script), **options)).choices[0].message.content)


def pieces(script: dict[str, Any]) -> list[str]:
    chunks = litellm.completion(**arguments(json.dumps(script), stream=True))
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]


def vectors(texts: Any, model: str = "litellm_embed") -> list[list[float]]:
    base = f"{URL}/v2/models/{model}/infer"
    answer = litellm.embedding(model="triton/any", api_base=base, input=texts, num_retries=0, max_retries=0)
    return [item["embedding"] for item in answer.data]


async def leave() -> int | None:
    stream = await litellm.acompletion(**arguments(slow_script(NOTICE), stream=True))
    return await left(stream, NOTICE)


show(
    {
        "generate": outcome(lambda: text({"outputs": 1, "texts": ["c3a4c3b6"]}, max_tokens=5)),
        "generate_stream": outcome(lambda: pieces({"outputs": 4})),
        "split character": outcome(lambda: pieces({"outputs": len(EMOJI), "texts": EMOJI})),
        "infer": outcome(lambda: text({"outputs": 1, "texts": ["c3a4"]}, path="litellm_text/infer", max_tokens=5)),
        "vectors": outcome(lambda: vectors(["a", "zwölf", "A cat sleeps."])),
        "unknown model": outcome(lambda: text({}, path="nobody/generate")),
        "unknown embedding model": outcome(lambda: vectors(["a"], "nobody")),
        "many responses": outcome(lambda: text({"outputs": 3})),
        "number out of range": outcome(lambda: text({"outputs": 1}, max_tokens=2**40)),
        "one text instead of a list": outcome(lambda: vectors("abc")),
        "failed model": outcome(lambda: text({"outputs": 0, "then": "error"})),
        "failed stream": outcome(lambda: pieces({"outputs": 2, "interval_s": 0.05, "then": "error"})),
        "left": asyncio.run(leave()),
    }
)
