"""Tools with LangChain's class for OpenAI. Arguments: base URL, a JSON object of what each model writes."""

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from outcomes import outcome, show

URL, TEXTS = sys.argv[1], json.loads(sys.argv[2])


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"31 degrees in {city}"


def chat(model: str, **options: Any) -> Any:
    made = ChatOpenAI(model=model, base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return made.bind_tools([weather], **options)


def asking(text: str) -> HumanMessage:
    return HumanMessage(f"Please write: {text}")


def answer_of(message: Any) -> dict[str, Any]:
    return {"text": message.content, "calls": [[call["name"], call["args"]] for call in message.tool_calls]}


def streamed(model: str) -> dict[str, Any]:
    whole, *chunks = chat(model).stream([asking(TEXTS[model])])
    for chunk in chunks:
        whole += chunk
    return answer_of(whole)


def with_result(model: str) -> str:
    called = chat(model).invoke([asking(TEXTS[model])])
    results = [weather.invoke(call) for call in called.tool_calls]
    assert all(isinstance(each, ToolMessage) for each in results)
    return chat(model).invoke([HumanMessage("Please write: "), called, *results]).content


def forced(model: str) -> dict[str, Any]:
    return answer_of(chat(model, tool_choice="weather").invoke([asking('{"city": "Lima"}')]))


show(
    {
        model: {
            "answer": outcome(lambda model=model: answer_of(chat(model).invoke([asking(TEXTS[model])]))),
            "stream": outcome(lambda model=model: streamed(model)),
            "result": outcome(lambda model=model: with_result(model)),
            "forced": outcome(lambda model=model: forced(model)),
        }
        for model in TEXTS
    }
)
