"""Tools and output types with Pydantic AI. Arguments: base URL, a JSON object of what each model writes."""

import json
import sys
from typing import Any

from outcomes import outcome, show
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, TEXTS = sys.argv[1], json.loads(sys.argv[2])


class City(BaseModel):
    city: str


def agent(name: str, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    return Agent(OpenAIChatModel(name, provider=provider), retries=0, **options)


def answered(name: str, output_type: Any, text: str) -> Any:
    return agent(name, output_type=output_type).run_sync(f"Please write: {text}").output.model_dump()


show(
    {
        model: {
            "object": outcome(lambda model=model: answered(model, NativeOutput(City), '{"city": "Lima"}')),
            "byTool": outcome(
                lambda model=model: answered(model, City, '[{"name": "final_result", "parameters": {"city": "Lima"}}]')
            ),
        }
        for model in TEXTS
    }
)
