"""The formats whose calls are JSON objects: Llama 3, Mistral, Hermes, and guided answers."""

import re

from app.pipelines.openai.tool_calls.json_calls import JsonCallParser
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Steps

_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s{0,8}([\w.-]{1,64})\s{0,8}(\[CALL_ID\]\w{0,32})?(\[ARGS\])?\s{0,8}(?=\{)", re.ASCII)
_LONGEST = 160
_BEGINNING, _END = "<tool_call>", "</tool_call>"


class Llama3JsonParser(JsonCallParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}``, several separated by ``;``.

    ``<|python_tag|>`` may precede them. Source: Meta's prompt format of Llama 3.1.
    """

    def _run(self) -> Steps[None]:
        while marker := (yield from self._until(_PYTHON_TAG, "{")):
            before = marker
            if marker == _PYTHON_TAG:
                before += yield from self._white()
            else:
                self._text, before = marker + self._text, ""
            yield from self._calls(before)

    def _calls(self, before: str) -> Steps[None]:
        """``before``: was taken before the first call."""
        while (yield from self._begins_object()):
            if not (yield from self._json_call(before)):
                return
            before = yield from self._white(";,")
            if not self._text:
                return
        self._as_text(before, self._text.startswith("{"))

    def _begins_object(self) -> Steps[bool]:
        """Whether an object with members comes next: other braces are text at once."""
        while True:
            bare = self._text[1:MAX_HELD].lstrip()
            if self._text and (bare or not self._text.startswith("{")):
                return self._text.startswith("{") and bare.startswith('"')
            if not (yield from self._more()):
                return False


class MistralParser(JsonCallParser):
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer ``[TOOL_CALLS]name[ARGS]{...}``.

    Between a name and ``[ARGS]`` there may be ``[CALL_ID]`` and an id; ``[ARGS]`` may be left out. Source:
    mistral-common's tokenizers v3 to v13. The markers are special tokens.
    """

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_TOOL_CALLS)):
            space = yield from self._white()
            if self._text.startswith("["):
                yield from self._json_calls(before + space + self._take(1))
            else:
                yield from self._named_call(before + space)

    def _named_call(self, before: str) -> Steps[None]:
        found = yield from self._head(_NAMED, _LONGEST)
        if found is None or found[1] not in self._tools:
            self._give("text", before)
            return
        self._take(found.end())
        self._give("call", found[1])
        yield from self._object()


class HermesParser(JsonCallParser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one pair of tags for each call.

    Source: the chat templates of Hermes 2 Pro and Qwen 2.5.
    """

    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_BEGINNING)):
            before += yield from self._white()
            if not self._text.startswith("{"):
                self._give("text", before)
            elif (yield from self._json_call(before)):
                space = yield from self._white()
                if not (yield from self._starts(_END)):
                    self._give("text", space)


class GuidedCallsParser(JsonCallParser):
    """``[{"name": ..., "parameters": {...}}]``."""

    def _run(self) -> Steps[None]:
        before = yield from self._white()
        if self._text.startswith("["):
            yield from self._json_calls(before + self._take(1))
        else:
            self._give("text", before)
        yield from self._everything()


class GuidedArgumentsParser(JsonCallParser):
    """The arguments of the only tool."""

    def _run(self) -> Steps[None]:
        before = yield from self._white()
        if self._text.startswith("{"):
            self._give("call", next(iter(self._tools)))
            yield from self._object()
        else:
            self._give("text", before)
        yield from self._everything()
