"""Chat templates: the messages of a conversation -> the prompt, by jinja2 in its sandbox and at a bounded cost.

The names that a template sees, and the environment that it runs in, are those of ``apply_chat_template`` of
transformers 5. The operator chooses the template, and a caller only writes the messages and tools: what is bounded is
how much work a conversation can cause.

Templates of vision models either write the model's image marker for each part of the type ``image``, or take only
texts, in which the marker must stand already. Two renderings of a short message tell which.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from datetime import datetime
from itertools import count
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from app.core.errors import FieldProblem, InvalidInput

MAX_STEPS = 20_000
"""Turns of loops and calls of functions, for one conversation."""
MAX_TEMPLATE_CHARACTERS = 65_536
"""That a template may add to the text of the messages and tools."""
GROWTH = 4
"""How many times a template may repeat the text of the messages and tools."""
MAX_COPIED_CHARACTERS = 16 * 1024 * 1024
COPIES = 32
"""A template may copy this many times the text of the messages and tools, and MAX_COPIED_CHARACTERS."""
_MAX_REPEATED = 4096
"""Characters or items of a sequence that is multiplied."""
_BUDGET = "the budget of this conversation"
"""Not a name that a template could write."""
_TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": "time",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string", "description": "The time zone."}}},
    },
}

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Content = str | Sequence[Mapping[str, Any]]
"""A text, or parts of the types ``text`` and ``image``."""
IMAGE: Mapping[str, Any] = {"type": "image"}
NUMBER = "{number}"
"""In a marker: the number of the image in the conversation, from 1."""
_WORD = "Describe"
Tool = Mapping[str, Any]
"""A function in OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


@dataclass(eq=False)
class ChatTemplate:
    """Compiled once. May render in several threads at a time.

    Raises ValueError if the text is not a template, or does not render a conversation of one message.
    """

    text: str
    variables: InitVar[Mapping[str, Any]]
    """The operator's variables."""
    strips_bos: bool = False
    """Remove a leading ``bos_token``, for a model that adds its own to every prompt."""
    image_marker: str | None = None
    """The text of an image, for a template that takes only texts."""
    tool_use: "ChatTemplate | None" = None
    """The template for conversations with tools."""
    has_tools: bool = False
    """Whether this is such a template."""

    def __post_init__(self, variables: Mapping[str, Any]) -> None:
        try:
            tree = _Counting().visit(_ENVIRONMENT.parse(self.text))
        except TemplateSyntaxError as exc:
            raise ValueError(f"is not a template: line {exc.lineno}: {exc.message}") from exc
        self._template = _ENVIRONMENT.from_string(tree.set_environment(_ENVIRONMENT))
        self._variables = {"bos_token": "", "eos_token": "", "documents": None, **variables}
        self._bos = str(self._variables["bos_token"]) if self.strips_bos else ""
        self._trial_tools = [_TRIAL_TOOL] if self.has_tools else None
        try:
            with suppress(_Refused):  # a template may refuse the conversation
                self._rendered([{"role": "user", "content": "Hello"}], self._trial_tools)
        except Exception as exc:
            raise ValueError(f"does not render one message of a user: {type(exc).__name__}: {exc}") from exc
        text = {"type": "text", "text": _WORD}
        plain, one, two = (self._tried([*images, text]) for images in ([], [IMAGE], [IMAGE, IMAGE]))
        takes_parts = _WORD in plain and not _is_quoted("text", plain)
        self._has_parts = (  # whether the template writes the markers itself
            takes_parts and _WORD in one and not _is_quoted("image", one) and len(plain) < len(one) < len(two)
        )
        self._only_parts = takes_parts and _WORD not in self._tried(_WORD)

    @property
    def reserved(self) -> frozenset[str]:
        """The names that a caller's variables cannot have: the gateway or the operator sets them."""
        return frozenset({"messages", "tools", "add_generation_prompt", *self._variables, *_ENVIRONMENT.globals})

    @property
    def takes_images(self) -> bool:
        """Whether messages may have parts of the type ``image``, also in conversations with tools."""
        has_place = self._has_parts or self.image_marker is not None
        return has_place and (self.tool_use is None or self.tool_use.takes_images)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, variables: Mapping[str, Any] = {}
    ) -> str:
        """Messages with images need :attr:`takes_images`.

        ``variables``: of the caller, none of them reserved. Raises InvalidInput.
        """
        if tools is not None and self.tool_use is not None:
            return self.tool_use.render(messages, tools, variables)
        try:
            prompt = self._rendered(self._fitted(messages), tools, variables).removeprefix(self._bos)
        except _Refused as exc:
            words = str(exc)  # shown only if none of them comes from the messages
            shown = f" by the model's chat template: {words}" if words in self.text else ""
            raise _invalid(f"are refused{shown}") from exc
        except _TooMuch as exc:
            raise _invalid("are too many or too long for the model's chat template") from exc
        except Exception as exc:  # a template can raise anything
            _log.warning("a chat template failed: %s", type(exc).__name__)
            raise _invalid("cannot be rendered by the model's chat template") from exc
        contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
        images, marker = sum(part == IMAGE for content in contents for part in content), self.image_marker
        if images and not self._has_parts and marker and NUMBER not in marker and prompt.count(marker) != images:
            raise _invalid("have the model's marker of an image in a text")  # the model would see another image
        return prompt

    def _fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages as the template takes them."""
        numbers = count(1)

        def text_of(part: Mapping[str, Any]) -> str:
            is_image = part["type"] == IMAGE["type"]
            return (self.image_marker or "").replace(NUMBER, str(next(numbers))) if is_image else str(part["text"])

        def fitted(content: Any) -> Any:
            if not isinstance(content, str | list) or (isinstance(content, list) and self._has_parts):
                return content
            text = content if isinstance(content, str) else "".join(map(text_of, content))
            return [{"type": "text", "text": text}] if self._only_parts else text

        return [{**message, "content": fitted(message.get("content"))} for message in messages]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any] = {}
    ) -> str:
        given = _characters_in(messages) + _characters_in(tools)
        most = MAX_TEMPLATE_CHARACTERS + GROWTH * given
        names = {**variables, **self._variables, "messages": list(messages), "add_generation_prompt": True}
        if tools is not None or "tools" not in self._variables:  # a variable of the operator counts without tools
            names["tools"] = None if tools is None else list(tools)
        names[_BUDGET] = _Budget(MAX_COPIED_CHARACTERS + COPIES * given)
        pieces: list[str] = []
        for piece in self._template.generate(names):
            pieces.append(piece)
            most -= len(piece)
            if most < 0:
                raise _TooMuch
        return "".join(pieces)

    def _tried(self, content: Content) -> str:
        """Returns the prompt of one message of a user; empty if the template fails."""
        try:
            return self._rendered([{"role": "user", "content": content}], self._trial_tools)
        except Exception:  # a template can raise anything
            return ""


def _is_quoted(word: str, prompt: str) -> bool:
    """Whether the template wrote the parts themselves, as Python or JSON writes a list."""
    return f"'type': '{word}'" in prompt or f'"type": "{word}"' in prompt


class _Refused(TemplateError):
    """The template called ``raise_exception``."""


class _TooMuch(TemplateError):
    """The conversation costs more than it may."""


class _Budget:
    __slots__ = ("_characters", "_steps")

    def __init__(self, characters: int) -> None:
        self._steps = MAX_STEPS
        self._characters = characters

    def spend(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise _TooMuch

    def copied(self, value: Any) -> Any:
        """Returns what an expression has made, and counts the characters of a text or the items of a list."""
        if isinstance(value, str | list | tuple):
            self._characters -= len(value)
            if self._characters < 0:
                raise _TooMuch
        return value


class _Sandbox(ImmutableSandboxedEnvironment):
    """Counts every call, and what it returns. Multiplies only numbers and short sequences."""

    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        budget: _Budget = __context.parent[_BUDGET]
        budget.spend()
        return budget.copied(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        if not (isinstance(left, float | int) and isinstance(right, float | int)):
            count = next((each for each in (left, right) if isinstance(each, int)), 0)
            if count * sum(len(each) for each in (left, right) if not isinstance(each, int)) > _MAX_REPEATED:
                raise _TooMuch
        return super().call_binop(context, operator, left, right)


@pass_context
def _measured(context: Context, value: Any) -> Any:
    return context.parent[_BUDGET].copied(value)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    spend: Callable[[], None] = context.parent[_BUDGET].spend
    for item in items:
        spend()
        yield item


def _tojson(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0
) -> str:
    """Unlike jinja2's filter, does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(words: str) -> NoReturn:
    raise _Refused(str(words))


class _Namespace(Namespace):
    """Refuses names that begin with an underscore, which Python gives a meaning."""

    def __init__(*args: Any, **attributes: Any) -> None:
        """Without ``self``, which a template may use as the name of an attribute."""
        namespace, *given = args
        Namespace.__init__(namespace)
        for name, value in dict(*given, **attributes).items():
            namespace[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a namespace cannot have names that begin with an underscore")
        super().__setitem__(name, value)


class _Generation(Extension):
    """``{% generation %}`` marks the text of the assistant for training. It changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_ENVIRONMENT = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
_ENVIRONMENT.filters |= {"counted": _counted, "measured": _measured, "tojson": _tojson}
_ENVIRONMENT.globals |= {
    "namespace": _Namespace,
    "raise_exception": _refuse,
    "strftime_now": lambda pattern: datetime.now().strftime(pattern),
}


class _Counting(NodeTransformer):
    """Counts the turns of each loop, and the characters that each expression copies."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.For):
            node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        super().generic_visit(node, *args, **kwargs)
        copies = isinstance(node, nodes.Add | nodes.Concat | nodes.Filter) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        )
        return nodes.Filter(node, "measured", [], [], None, None, lineno=node.lineno) if copies else node


def _characters_in(value: Any) -> int:
    """The length of all texts, keys and other values in messages or tools."""
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _characters_in(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters_in, value))
    return len(value) if isinstance(value, str) else len(str(value))


def _invalid(words: str) -> InvalidInput:
    return InvalidInput(f"'messages' {words}.", errors=[FieldProblem("messages", words)])
