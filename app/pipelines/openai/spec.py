"""The keys of ``openai:`` of a pipeline in ``gateway.yaml``."""

from typing import Literal, Self

from pydantic import model_validator

from app.config.document import JsonValue, Name, Section

Parameter = Literal["max_tokens", "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"]
"""OpenAI's parameters that a model can have."""


class CompletionsSpec(Section):
    """The names of an input and an output of the pipeline."""

    prompt: Name = "prompt"
    text: Name = "text"


class ChatSpec(CompletionsSpec):
    """``template_text`` of a file that was read is always the template's text."""

    template: str | None = None
    template_text: str | None = None
    variables: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.template is None) == (self.template_text is None):
            raise ValueError("needs exactly one of template and template_text")
        return self


class EmbeddingsSpec(Section):
    """The names of an input and an output of the pipeline."""

    input: Name = "text"
    embedding: Name = "embedding"


class UsageSpec(Section):
    """The model's output tensors that tell the numbers of tokens."""

    prompt_tokens: str
    completion_tokens: str | None = None


class OpenAISpec(Section):
    completions: CompletionsSpec | None = None
    chat: ChatSpec | None = None
    embeddings: EmbeddingsSpec | None = None
    finish_reason: Name | None = None
    parameters: dict[Parameter, Name] = {}
    usage: UsageSpec | None = None

    @model_validator(mode="after")
    def _offers_something(self) -> Self:
        if self.completions is None and self.chat is None and self.embeddings is None:
            raise ValueError("needs one of completions, chat and embeddings")
        return self
