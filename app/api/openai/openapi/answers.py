"""The schemas of OpenAI's answers, with the members that this gateway writes."""

from app.domain.json_schema import Schema, const_of, enum_of

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FINISH_REASON: Schema = enum_of(["stop", "length"])
_NO_LOGPROBS: Schema = {"type": "null"}


def _object(properties: Schema, *optional: str) -> Schema:
    return {
        "type": "object",
        "required": [name for name in properties if name not in optional],
        "properties": properties,
        "additionalProperties": False,
    }


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(name: str, choice: Schema, usage: Schema) -> Schema:
    head = {"id": _TEXT, "object": const_of(name), "created": _COUNT, "model": _TEXT}
    return _object({**head, "choices": _list(choice), "usage": usage}, "usage")


def _choice(content: Schema, finish_reason: Schema) -> Schema:
    return _object({"index": const_of(0), **content, "logprobs": _NO_LOGPROBS, "finish_reason": finish_reason})


_MESSAGE = _object({"role": const_of("assistant"), "content": _TEXT, "refusal": {"type": "null"}})
_DELTA = _object({"role": const_of("assistant"), "content": _TEXT}, "role", "content")
_TOKENS = {"prompt_tokens": _COUNT, "total_tokens": _COUNT}
_USAGE = _ref("OpenAIUsage")
_EMBEDDING = _object(
    {
        "object": const_of("embedding"),
        "index": _COUNT,
        "embedding": {"anyOf": [_list({"type": "number"}), {**_TEXT, "contentEncoding": "base64"}]},
    }
)
_ERROR = _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _TEXT})

ANSWERS: Schema = {
    "OpenAIError": _object({"error": _ERROR}),
    "OpenAIUsage": _object({**_TOKENS, "completion_tokens": _COUNT}),
    "OpenAIModel": _object({"id": _TEXT, "object": const_of("model"), "created": _COUNT, "owned_by": _TEXT}),
    "OpenAICompletion": _answer("text_completion", _choice({"text": _TEXT}, _FINISH_REASON), _USAGE),
    "OpenAICompletionChunk": _answer(
        "text_completion", _choice({"text": _TEXT}, _or_null(_FINISH_REASON)), _or_null(_USAGE)
    ),
    "OpenAIChatCompletion": _answer("chat.completion", _choice({"message": _MESSAGE}, _FINISH_REASON), _USAGE),
    "OpenAIChatCompletionChunk": _answer(
        "chat.completion.chunk", _choice({"delta": _DELTA}, _or_null(_FINISH_REASON)), _or_null(_USAGE)
    ),
    "OpenAIEmbeddings": _object(
        {"object": const_of("list"), "model": _TEXT, "usage": _object(_TOKENS), "data": _list(_EMBEDDING)}, "usage"
    ),
}
