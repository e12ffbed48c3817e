"""The calls of LiteLLM's provider `openai`. Arguments: base URL, file that a cancelled model writes."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from outcomes import left, outcome, show, slow_script

URL, NOTICE = sys.argv[1], Path(sys.argv[2])
OPTIONS: dict[str, Any] = {"max_tokens": 24, "seed": 7}
ENDPOINT: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}


def chat(model: str, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return litellm.completion(model=f"openai/{model}", messages=messages, **ENDPOINT, **options)


def answer() -> dict[str, Any]:
    answer = chat("write", "What is a list?", **OPTIONS)
    return {"text": answer.choices[0].message.content, "reason": answer.choices[0].finish_reason, **tokens_of(answer)}


def tokens_of(answer: Any) -> dict[str, Any]:
    return {"prompt": answer.usage.prompt_tokens, "completion": answer.usage.completion_tokens}


def streamed() -> dict[str, Any]:
    chunks = list(chat("write", "What is a list?", stream=True, stream_options={"include_usage": True}, **OPTIONS))
    return {
        "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "reason": next(chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason),
        **tokens_of(chunks[-1]),
    }


def completion() -> str:
    answer = litellm.text_completion(model="openai/write", prompt="The for statement", **ENDPOINT, **OPTIONS)
    return str(answer.choices[0].text)


def vectors() -> list[list[float]]:
    answer = litellm.embedding(model="openai/embed", input=["A cat sleeps.", "Ein Hund"], **ENDPOINT)
    return [item["embedding"] for item in answer.data]


async def leave() -> int | None:
    messages = [{"role": "user", "content": slow_script(NOTICE)}]
    stream = await litellm.acompletion(model="openai/scripted_stream", messages=messages, stream=True, **ENDPOINT)
    return await left(stream, NOTICE)


show(
    {
        "answer": outcome(answer),
        "stream": outcome(streamed),
        "completion": outcome(completion),
        "vectors": outcome(vectors),
        "unknown model": outcome(lambda: chat("nobody", "a")),
        "bad input": outcome(lambda: chat("write", "a", max_tokens=100_000)),
        "failed model": outcome(lambda: chat("scripted_stream", '{"outputs": 0, "then": "error"}')),
        "failed stream": outcome(
            lambda: list(chat("scripted_stream", '{"outputs": 2, "interval_s": 0.05, "then": "error"}', stream=True))
        ),
        "left": asyncio.run(leave()),
    }
)
