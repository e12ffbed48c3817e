"""Fields that no model has and that do not change the answer: the gateway checks their type and ignores them.

A field that the pipeline declares under the same name is the pipeline's. docs/reference/openai.md lists these fields,
and docs/decisions/0031-openai-dialect.md has the reasons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.domain.json_schema import enum_of, only, with_types

MAX_TEXT_CHARACTERS = 1024
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
Labels = Annotated[dict[_Key, _Value], Meta(max_length=16)]
"""The limits are OpenAI's."""
NOT_SUPPORTED = "is not supported by this model"


@dataclass(frozen=True, slots=True)
class Neutral:
    """The values of a field that do not change the answer: those of a type, or a few.

    ``meaning``: for docs/reference/openai.md. ``otherwise``: what is wrong with any other value.
    """

    meaning: str
    type: Any = None
    values: Sequence[Any] = ()
    otherwise: str = NOT_SUPPORTED

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the accepted values."""
        if self.type is not None:
            schemas = [with_types(msgspec.json.schema(self.type)), {"type": "null"}]
        elif isinstance(self.values[0], (list, dict)):
            schemas = [*map(only, self.values), {"type": "null"}]
        else:
            return {**enum_of([*self.values, None]), "description": self.meaning}
        return {"anyOf": schemas, "description": self.meaning}


_BOOKKEEPING = {
    "metadata": Neutral("up to 16 labels, texts of up to 64 characters with texts of up to 512", type=Labels),
    "prompt_cache_key": Neutral("a text; the gateway has no cache of prompts", type=_Text),
    "prompt_cache_options": Neutral("an object like `metadata`", type=Labels),
    "prompt_cache_retention": Neutral("a text", type=_Text),
    "safety_identifier": Neutral("a text", type=_Text),
    "service_tier": Neutral("a text; priorities come from the API key", type=_Text),
    "store": Neutral("true or false; nothing is stored", type=bool),
    "user": Neutral("a text", type=_Text),
}
"""Fields about the caller, the price and the storage of a request."""

NEUTRAL_OF_EMBEDDINGS: Mapping[str, Neutral] = _BOOKKEEPING
NEUTRAL_OF_TEXTS: Mapping[str, Neutral] = _BOOKKEEPING | {
    "best_of": Neutral("only 1", values=[1], otherwise="is not supported"),
    "echo": Neutral("only `false`", values=[False]),
    "frequency_penalty": Neutral("only 0", values=[0]),
    "function_call": Neutral("only `none` and `auto`", values=["none", "auto"]),
    "functions": Neutral("only `[]`", values=[[]]),
    "ignore_eos": Neutral("only `false`", values=[False]),
    "logit_bias": Neutral("only `{}`", values=[{}]),
    "logprobs": Neutral("only `false`", values=[False]),
    "min_tokens": Neutral("only 0", values=[0]),
    "modalities": Neutral('only `["text"]`', values=[["text"]]),
    "n": Neutral("only 1", values=[1], otherwise="is not supported: a request has one answer"),
    "parallel_tool_calls": Neutral("true or false; there are no tools", type=bool),
    "prediction": Neutral("an object; the answer is generated without it", type=dict[str, Any]),
    "presence_penalty": Neutral("only 0", values=[0]),
    "reasoning_effort": Neutral("only `none`", values=["none"]),
    "response_format": Neutral('only `{"type": "text"}`', values=[{"type": "text"}]),
    "suffix": Neutral("only an empty text", values=[""]),
    "tool_choice": Neutral("only `none` and `auto`", values=["none", "auto"]),
    "tools": Neutral("only `[]`", values=[[]]),
    "top_logprobs": Neutral("only 0", values=[0]),
    "top_p": Neutral("only 1", values=[1]),
    "verbosity": Neutral("`low`, `medium` or `high`", type=Literal["low", "medium", "high"]),
}
