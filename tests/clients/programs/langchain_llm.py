"""LangChain's class for OpenAI's chats over LLM backends. Arguments: base URL, names of the models."""

import sys
from typing import Any

from langchain_openai import ChatOpenAI
from outcomes import outcome, show

URL, *MODELS = sys.argv[1:]


def chat(model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{URL}/v1", api_key="none", max_retries=0, **options)


def streamed(model: str) -> str:
    return "".join(chunk.content for chunk in chat(model).stream("Hi"))


def usage(model: str) -> Any:
    return chat(model).invoke("Hi").usage_metadata


show(
    {
        model: {
            "answer": outcome(lambda model=model: chat(model).invoke("Hi").content),
            "stream": outcome(lambda model=model: streamed(model)),
            "usage": outcome(lambda model=model: usage(model)),
            "wrong": outcome(lambda model=model: chat(model, top_p=0).invoke("Hi").content),
        }
        for model in MODELS
    }
)
