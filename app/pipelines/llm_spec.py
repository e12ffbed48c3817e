"""The keys of a pipeline over a language model: ``openai:``, and ``preset:``, which adds the keys of an LLM backend."""

import functools
from collections.abc import Iterator, Mapping, Set
from importlib.resources import files
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
import yaml
from msgspec import Struct
from pydantic import Field, PrivateAttr

from app.config.document import JsonValue, Name, Section
from app.core.model import ModelConfig
from app.llm.tokenizer import TokenizerFolder
from app.llm.tool_calls import NEED_SPECIAL_TOKENS, ReasoningFormat, ToolFormat

Parameter = Literal[
    "max_tokens", "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "stop", "ignore_eos"
]
"""OpenAI's parameters that a model can have."""
Tags = Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(min_length=2, max_length=2)]


class CompletionsSpec(Section):
    """The names of an input and an output of the pipeline."""

    prompt: Name = "prompt"
    text: Name = "text"


class ChatSpec(CompletionsSpec):
    """``template_text`` of a template file that was read is the file's text."""

    template: str | None = None
    template_text: str | None = None
    tokenizer: str | None = None
    """A folder with the tokenizer of the model, as on Hugging Face."""
    bos: Literal["strip", "keep"] | None = None
    """Whether a rendered ``bos_token`` at the beginning is removed. Left out: ``strip`` with ``tokenizer``."""
    variables: dict[str, JsonValue] = {}
    images: Name | None = None
    """The input for the images of the messages. Left out: the only input with ``kind: image``."""
    image_marker: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """The text of an image in the prompt, for a template that takes only texts. ``{number}``: which image, from 1."""
    max_images: Annotated[int, Field(ge=1, le=256)] = 16
    _folder: TokenizerFolder | None = PrivateAttr(None)

    def faults(self) -> Iterator[str]:
        if sum(each is not None for each in (self.template, self.template_text, self.tokenizer)) != 1:
            yield "needs exactly one of template, template_text and tokenizer"

    @property
    def folder(self) -> TokenizerFolder | None:
        """The content of ``tokenizer``, once it was read. Part of the comparison of two declarations."""
        return self._folder

    def with_folder(self, folder: TokenizerFolder) -> Self:
        copy = self.model_copy()
        copy._folder = folder
        return copy

    @property
    def strips_bos(self) -> bool:
        return self.bos == "strip" or (self.bos is None and self.tokenizer is not None)


class EmbeddingsSpec(Section):
    """The names of an input and an output of the pipeline."""

    input: Name = "text"
    embedding: Name = "embedding"


class UsageSpec(Section):
    """The model's output tensors that tell the numbers of tokens."""

    prompt_tokens: str
    completion_tokens: str | None = None
    completion_count: Literal["elements", "sum", "last"] = "elements"
    """How it counts: the elements of its tensor, the sum of their values, or the last value."""


class LogprobsSpec(Section):
    """``parameter``: the number of alternatives for a token. ``output``: a JSON list with an object for each token."""

    parameter: Name = "logprobs"
    output: Name = "logprobs"


class GuidedSpec(Section):
    """The parameters that hold the model's answer to a JSON schema."""

    parameter: Name
    """Gets the schema: as a JSON text, or in an object with the only member ``member``."""
    member: str | None = None
    also: dict[Name, JsonValue] = {}
    """Other parameters with the values that they have then."""


SamplingField = Literal[
    Parameter,
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "top_k",
    "top_logprobs",
]
"""A field of requests for a text, which a model may not have."""


class OpenAISpec(Section):
    completions: CompletionsSpec | None = None
    chat: ChatSpec | None = None
    embeddings: EmbeddingsSpec | None = None
    finish_reason: Name | None = None
    exits: dict[str, Literal["stop", "length", "content_filter"]] = {}
    """Reason of an early exit -> the finish reason."""
    parameters: dict[Parameter, Name] = {}
    ignored: list[SamplingField] = []
    """Fields that have no effect, although clients send them."""
    usage: UsageSpec | None = None
    logprobs: LogprobsSpec | None = None
    guided: GuidedSpec | None = None
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | Tags | None = None
    """How the model writes tool calls and reasoning. Reasoning: a format, or the tags around it."""

    def faults(self) -> Iterator[str]:
        if self.completions is None and self.chat is None and self.embeddings is None:
            yield "needs one of completions, chat and embeddings"
        if self.tools == "gpt_oss" and self.reasoning != "gpt_oss":
            yield "tools: gpt_oss needs reasoning: gpt_oss, because one format has both"
        if self.reasoning == "gpt_oss" and self.tools not in (None, "gpt_oss"):
            yield "reasoning: gpt_oss needs tools: gpt_oss, because one format has both"

    @property
    def format_of_special_tokens(self) -> str | None:
        """The format whose markers are special tokens, which a backend may leave out of the text."""
        formats = (each for each in (self.tools, self.reasoning) if isinstance(each, str))
        return next((each for each in formats if each in NEED_SPECIAL_TOKENS), None)

    def without(self, tensors: Set[str], outputs: Set[str], lacking: Set[str]) -> Self:
        """Returns the section without the parts whose output tensor or output is not among these.

        ``lacking``: the parameters without which ``guided`` is left out too.
        """
        changed: dict[str, None] = {}
        if self.usage is not None and not {self.usage.prompt_tokens, self.usage.completion_tokens} <= {None, *tensors}:
            changed["usage"] = None
        if self.logprobs is not None and self.logprobs.output not in outputs:
            changed["logprobs"] = None
        if self.guided is not None and {self.guided.parameter, *self.guided.also} & lacking:
            changed["guided"] = None
        return self.model_copy(update=changed)


PresetName = Literal["vllm", "tensorrt_llm", "tensorrt_llm_api", "vllm_embeddings"]
NAMES: tuple[PresetName, ...] = get_args(PresetName)


class Preset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of ``app/pipelines/presets``. ``pipeline`` is in the words of ``gateway.yaml``."""

    inputs: frozenset[str]
    outputs: frozenset[str]
    """The tensors by which a model is recognized."""
    only_decoupled: frozenset[str] = frozenset()
    """The parameters that a model without streams must not get."""
    automatic: bool = True
    """Whether a model without a declaration can get the preset."""
    accumulates_if: str = ""
    """The parameter of the model's configuration that says whether each response repeats the text so far."""
    body_bytes_by_input: dict[str, int] = {}
    """Input tensor -> the limit of a body for a model that has it."""
    pipeline: dict[str, Any]


@functools.cache
def preset_of(name: PresetName) -> Preset:
    text = files("app.pipelines").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    return msgspec.convert(yaml.safe_load(text), Preset)


def recognized(config: ModelConfig) -> PresetName | None:
    """The preset whose tensors the model has."""
    inputs, outputs = ({tensor.name for tensor in each} for each in (config.inputs, config.outputs))
    presets = ((name, preset_of(name)) for name in NAMES)
    found = (name for name, each in presets if each.automatic and each.inputs <= inputs and each.outputs <= outputs)
    return next(found, None)


def with_preset(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of a pipeline with those of its preset. A given key overrides the preset's, at every depth."""
    name = given.get("preset")
    return merged(preset_of(name).pipeline, given) if name in NAMES else given


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in given.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
