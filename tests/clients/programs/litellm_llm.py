"""LiteLLM's provider `openai` over LLM backends. Arguments: base URL, names of the models."""

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from outcomes import outcome, show

URL, *MODELS = sys.argv[1:]


def chat(model: str, **options: Any) -> Any:
    endpoint = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}
    messages = [{"role": "user", "content": "Hi"}]
    return litellm.completion(model=f"openai/{model}", messages=messages, **endpoint, **options)


def streamed(model: str) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chat(model, stream=True) if chunk.choices)


def usage(model: str) -> dict[str, int]:
    used = chat(model).usage
    return {"input_tokens": used.prompt_tokens, "output_tokens": used.completion_tokens}


show(
    {
        model: {
            "answer": outcome(lambda model=model: chat(model).choices[0].message.content),
            "stream": outcome(lambda model=model: streamed(model)),
            "usage": outcome(lambda model=model: usage(model)),
            "wrong": outcome(lambda model=model: str(chat(model, max_tokens=0))),
        }
        for model in MODELS
    }
)
