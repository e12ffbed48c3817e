"""The members of a body in OpenAI's form.

The gateway reads some members itself, and checks and ignores others (``Neutral``); the rest are fields of the pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.codecs.json_scan import has_more_elements, malformed, members_of
from app.core.errors import FieldProblem, InvalidInput
from app.core.json import enum_of, only, schema_of
from app.core.text import shown
from app.pipelines.body import Body, is_null, problem_of_value, refused

MAX_TEXT_CHARACTERS = 1024
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
Labels = Annotated[dict[_Key, _Value], Meta(max_length=16)]
"""The limits are OpenAI's."""
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NOT_SUPPORTED = "is not supported by this model"


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that does not change the answer, with the accepted values: those of a type, or a few.

    No model has these fields: the gateway checks their type and ignores them. A field that the pipeline declares under
    the same name is the pipeline's. docs/reference/openai.md lists these fields, and
    docs/decisions/0019-openai-dialect.md has the reasons.

    ``meaning``: for docs/reference/openai.md.
    """

    meaning: str
    type: Any = None
    values: Sequence[Any] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the accepted values."""
        if self.type is not None:
            schemas = [schema_of(self.type), {"type": "null"}]
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
    "best_of": Neutral("only 1", values=[1]),
    "echo": Neutral("only `false`; of chats", values=[False]),
    "frequency_penalty": Neutral("only 0", values=[0]),
    "function_call": Neutral("only `none` and `auto`", values=["none", "auto"]),
    "functions": Neutral("only `[]`", values=[[]]),
    "ignore_eos": Neutral("only `false`", values=[False]),
    "logit_bias": Neutral("only `{}`", values=[{}]),
    "logprobs": Neutral("only `false`", values=[False]),
    "min_tokens": Neutral("only 0", values=[0]),
    "modalities": Neutral('only `["text"]`', values=[["text"]]),
    "parallel_tool_calls": Neutral("true or false; there are no tools", type=bool),
    "prediction": Neutral("an object; the answer is generated without it", type=dict[str, Any]),
    "presence_penalty": Neutral("only 0", values=[0]),
    "reasoning_effort": Neutral("only `none`", values=["none"]),
    "response_format": Neutral('only `{"type": "text"}`; of completions', values=[{"type": "text"}]),
    "suffix": Neutral("only an empty text", values=[""]),
    "tool_choice": Neutral("only `none` and `auto`", values=["none", "auto"]),
    "tools": Neutral("only `[]`", values=[[]]),
    "top_logprobs": Neutral("only 0", values=[0]),
    "top_p": Neutral("only 1", values=[1]),
    "verbosity": Neutral("`low`, `medium` or `high`", type=Literal["low", "medium", "high"]),
}


Members = dict[str, memoryview]
"""The members that are not null, as JSON."""
Value = TypeVar("Value")

MAX_MEMBERS = 256
MAX_ELEMENTS = 64
"""Limit of the values and members nested in one member, because each uses more memory than its text."""


def read_members(body: Body) -> Members:
    """Reads the members of a body in OpenAI's form.

    Raises InvalidJson, InvalidRequest, or InvalidInput for a member that is given twice.
    """
    members: Members = {}
    for name, text in members_of(memoryview(body)):
        if name in members:
            raise refused([FieldProblem(shown(name), "is given twice")])
        if len(members) == MAX_MEMBERS:
            raise refused([FieldProblem("body", f"has more than {MAX_MEMBERS} fields")])
        members[name] = text
    return {name: text for name, text in members.items() if not is_null(text)}


def check_size_of(members: Members, name: str, max_bytes: int) -> None:
    """Raises InvalidInput."""
    if len(members.get(name, b"")) > max_bytes:
        raise refused([FieldProblem(name, f"has more than {max_bytes} bytes")])


def take(members: Members, name: str, type_: Any, default: Value, *, max_elements: int = MAX_ELEMENTS) -> Value:
    """Takes a member out. Raises InvalidInput or InvalidJson."""
    text = members.pop(name, None)
    if text is None:
        return default
    if len(text) > 2 * max_elements and has_more_elements(text, max_elements):
        raise refused([FieldProblem(name, f"has more than {max_elements} elements")])
    try:
        value: Value = msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as exc:
        raise refused([problem_of_value(name, str(exc))]) from exc
    except (ValueError, RecursionError) as exc:
        raise malformed() from exc
    return value


def required(name: str) -> InvalidInput:
    return refused([FieldProblem(name, "is required")])


def problems_of(name: str, text: memoryview, neutral: Neutral | None) -> Sequence[FieldProblem]:
    """Returns what is wrong with a member that the pipeline has no field for. Raises InvalidJson."""
    if neutral is None:
        return [FieldProblem(shown(name), NOT_SUPPORTED)]
    if neutral.type is None:
        value = take({name: text}, name, Any, None, max_elements=len(text)) if len(text) <= 256 else None
        is_known = any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in neutral.values)
        return () if is_known else [FieldProblem(name, NOT_SUPPORTED)]
    try:
        take({name: text}, name, neutral.type, None)
    except InvalidInput as exc:
        return exc.errors
    return ()
