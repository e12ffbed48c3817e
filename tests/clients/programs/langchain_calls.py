"""The calls of LangChain's classes for OpenAI. Arguments: base URL, file that a cancelled model writes."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from outcomes import CHUNKS, outcome, sent_until_cancelled, show, slow_script

URL, NOTICE = sys.argv[1], Path(sys.argv[2])
ENDPOINT: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
OPTIONS: dict[str, Any] = {"max_tokens": 24, "seed": 7}
QUESTION = "What is a list?"


def chat(model: str = "write", **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, **ENDPOINT, **options)


def answer_of(message: Any) -> dict[str, Any]:
    used = message.usage_metadata
    return {"text": message.content, "prompt": used["input_tokens"], "completion": used["output_tokens"]}


def streamed() -> dict[str, Any]:
    chunks = list(chat(stream_usage=True, **OPTIONS).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return answer_of(whole)


def vectors() -> list[list[float]]:
    embeddings = OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **ENDPOINT)
    return embeddings.embed_documents(["A cat sleeps.", "Ein Hund"])


def completion() -> str:
    return OpenAI(model="write", **ENDPOINT, **OPTIONS, temperature=0.8).invoke("The for statement")


def leave() -> int | None:
    stream = chat("scripted_stream").stream(slow_script(NOTICE))
    for _ in range(CHUNKS):
        next(stream)
    stream.close()
    return sent_until_cancelled(NOTICE)


failing = '{"outputs": 2, "interval_s": 0.05, "then": "error"}'
show(
    {
        "answer": outcome(lambda: answer_of(chat(**OPTIONS).invoke(QUESTION))),
        "asynchronous answer": outcome(lambda: answer_of(asyncio.run(chat(**OPTIONS).ainvoke(QUESTION)))),
        "stream": outcome(streamed),
        "completion": outcome(completion),
        "vectors": outcome(vectors),
        "unknown model": outcome(lambda: chat("nobody").invoke("a")),
        "bad input": outcome(lambda: chat(max_tokens=100_000).invoke("a")),
        "failed stream": outcome(lambda: list(chat("scripted_stream").stream(failing))),
        "left": leave(),
    }
)
