"""The calls of LangChain's classes for OpenAI: address of the gateway, a file for a notice."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from leaving import CHUNKS, sent_until_cancelled, slow_script
from outcomes import outcome, show

URL, NOTICE = sys.argv[1], Path(sys.argv[2])
ENDPOINT: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
WISHES: dict[str, Any] = {"max_tokens": 24, "seed": 7}
QUESTION = "What is a list?"


def chat(model: str = "write", **wishes: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, **ENDPOINT, **wishes)


def said(message: Any) -> dict[str, Any]:
    used = message.usage_metadata
    return {"text": message.content, "prompt": used["input_tokens"], "completion": used["output_tokens"]}


def streamed() -> dict[str, Any]:
    chunks = list(chat(stream_usage=True, **WISHES).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return said(whole)


def vectors() -> list[list[float]]:
    embeddings = OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **ENDPOINT)
    return embeddings.embed_documents(["A cat sleeps.", "Ein Hund"])


def leave() -> int | None:
    stream = chat("scripted_stream").stream(slow_script(NOTICE))
    for _ in range(CHUNKS):
        next(stream)
    stream.close()
    return sent_until_cancelled(NOTICE)


failing = '{"outputs": 2, "interval_s": 0.05, "then": "error"}'
show(
    {
        "answer": outcome(lambda: said(chat(**WISHES).invoke(QUESTION))),
        "asynchronous answer": outcome(lambda: said(asyncio.run(chat(**WISHES).ainvoke(QUESTION)))),
        "stream": outcome(streamed),
        "completion": outcome(lambda: OpenAI(model="write", **ENDPOINT, **WISHES, temperature=0.8).invoke("The for")),
        "vectors": outcome(vectors),
        "unknown model": outcome(lambda: chat("nobody").invoke("a")),
        "bad input": outcome(lambda: chat(max_tokens=100_000).invoke("a")),
        "failed stream": outcome(lambda: list(chat("scripted_stream").stream(failing))),
        "left": leave(),
    }
)
