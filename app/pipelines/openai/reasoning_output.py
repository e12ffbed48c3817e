"""The output ``reasoning`` of a chat pipeline under ``/v1/pipelines``: what a model writes before its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.core.answer import Values
from app.core.inference import InferenceRequest
from app.pipelines.inputs import InputField
from app.pipelines.openai.mapping import OpenAIMapping
from app.pipelines.openai.tool_calls.formats import PROMPT_END, AnswerParser, Reasoning, parser_of
from app.pipelines.openai.tool_calls.parser import Part
from app.pipelines.outputs import OutputField

NAME = "reasoning"


class Division:
    """Divides the text of one answer into its reasoning and the rest, for any division of the text into pieces."""

    def __init__(self, text: str, parser: AnswerParser) -> None:
        """``text``: the name of the output."""
        self._text = text
        self._parser = parser

    def divided(self, values: Values) -> Values:
        """Returns the values of one response, with what is certain of its text."""
        return {**values, **self._named(self._parser.add(values[self._text] or ""))}

    def rests(self, rests: Mapping[str, str]) -> Mapping[str, str]:
        """``rests``: the remaining texts by output; those of this answer are divided. Empty ones are left out."""
        parts = [*self._parser.add(rests.get(self._text, "")), *self._parser.finish()]
        return {name: rest for name, rest in {**rests, **self._named(parts)}.items() if rest}

    def _named(self, parts: Sequence[Part]) -> dict[str, str]:
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        return {self._text: "".join(part.text for part in parts if part.kind == "text"), NAME: reasoning}


@dataclass(frozen=True, slots=True)
class ReasoningOutput:
    """``text``: the output that has the reasoning. ``prompt``: the tensor of the prompt."""

    text: str
    prompt: str
    reasoning: Reasoning

    @classmethod
    def of(
        cls, openai: OpenAIMapping | None, inputs: Sequence[InputField], outputs: Sequence[OutputField]
    ) -> "ReasoningOutput | None":
        """Returns None for a pipeline without ``openai: reasoning``, or with an own output of this name."""
        chat = None if openai is None else openai.chat
        if chat is None or chat.reasoning is None or any(field.name == NAME for field in outputs):
            return None
        prompt = next(field.tensor.name for field in inputs if field.name == chat.prompt)
        return cls(chat.text, prompt, chat.reasoning)

    def field(self, outputs: Sequence[OutputField]) -> OutputField:
        text = next(field for field in outputs if field.name == self.text)
        described = text.spec.model_copy(update={"description": "What the model wrote before the text."})
        return replace(text, name=NAME, spec=described, is_reasoning=True)

    def division_of(self, request: InferenceRequest) -> Division | None:
        tensors = (each.array for each in request.inputs if each.name == self.prompt and each.array.size)
        prompt = bytes(next((array.flat[-1] for array in tensors), b""))[-PROMPT_END:].decode("utf-8", "replace")
        parser = parser_of(None, {}, self.reasoning, prompt)
        return None if parser is None else Division(self.text, parser)
