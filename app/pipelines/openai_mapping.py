"""``openai:`` of a pipeline, compiled against the pipeline's fields."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from app.config.mismatch import PipelineMismatch, mismatch_at, named, tensor_named
from app.core.answer import Values
from app.core.inference import BYTES, FLOAT_DATATYPES, INTEGER_DATATYPES, InferenceRequest
from app.core.json import json_of
from app.core.model import ModelConfig
from app.llm.answer_parser import Part
from app.llm.template import ChatTemplate
from app.llm.tokenizer import TokenizerFolder
from app.llm.tool_calls import PROMPT_END, Reasoning, ToolFormat, parser_of
from app.pipelines.fields import Field, InputField, OutputField, ParameterField
from app.pipelines.llm_spec import ChatSpec, CompletionsSpec, EmbeddingsSpec, OpenAISpec
from app.pipelines.spec import ADAPTER

FINISH_REASON = "finish_reason"
SKIPS_SPECIAL_TOKENS = "skip_special_tokens"
"""vLLM's parameter: false keeps special tokens in the text."""


@dataclass(frozen=True, slots=True)
class ImagesForm:
    """The input of a pipeline for the images of messages."""

    input: str
    most: int
    """The largest number of images in a request."""
    is_single: bool
    """Whether the input is one image instead of a list."""
    may_be_empty: bool
    """Whether a request without images has an empty list, because the model requires a list of any length."""


@dataclass(frozen=True, slots=True)
class TextForm:
    """A pipeline that writes a text: the names of its fields, and of the model's tensors that count tokens."""

    prompt: str
    text: str
    finish_reason: str | None
    openai: OpenAISpec
    field_by_parameter: Mapping[str, str]
    """OpenAI's name -> the pipeline's, for every field that a request may set in addition to the prompt."""
    template: ChatTemplate | None = None
    tokenizer: TokenizerFolder | None = None
    """The tokenizer of ``chat``; counts tokens, if it can."""
    tools: ToolFormat | None = None
    reasoning: Reasoning | None = None
    """How the model writes tool calls and reasoning. Only of ``chat``; None if it does not."""
    special_tokens: str | None = None
    """The parameter that keeps special tokens in the text, if these formats need it and there is one."""
    images: ImagesForm | None = None
    """Only of ``chat``; None if messages cannot have images."""
    prompt_tensor: str = ""

    def guided_fields(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the fields that hold the model's answer to a schema; empty if the model cannot be guided."""
        guided = self.openai.guided
        if guided is None:
            return {}
        value = json_of(schema).decode() if guided.member is None else {guided.member: schema}
        return {guided.parameter: value, **guided.also}


@dataclass(frozen=True, slots=True)
class EmbeddingsForm:
    """A pipeline that turns a text into a vector: the names of its fields."""

    input: str
    takes_tokens: bool
    """Whether a text may be given as its token ids."""
    tensor: str | None
    """The tensor of the texts; None if each text is a request of its own."""
    embedding: str
    length: int
    """The size of a vector; -1 means any."""
    field_by_parameter: Mapping[str, str]


class OpenAIMapping:
    """The forms of a pipeline under OpenAI's addresses, with the pipeline's fields that ``openai:`` refers to."""

    def __init__(
        self, spec: OpenAISpec, config: ModelConfig, fields: Mapping[str, Field], outputs: Sequence[OutputField]
    ) -> None:
        """Raises PipelineMismatch, as all methods do."""
        self._spec, self._fields = spec, fields
        self._inputs = {name: field for name, field in fields.items() if isinstance(field, InputField)}
        self._parameters = {name: field for name, field in fields.items() if isinstance(field, ParameterField)}
        self._outputs = {field.name: field for field in outputs}
        usage, folder = spec.usage, spec.chat.folder if spec.chat is not None else None
        for key in ("prompt_tokens", "completion_tokens"):
            name: str | None = getattr(usage, key, None)
            if name is not None:
                tensor = tensor_named(config.outputs, name, ("usage", key))
                if tensor.datatype not in INTEGER_DATATYPES:
                    text = f"'{name}' has datatype {tensor.datatype}; an integer type is needed"
                    raise PipelineMismatch(("usage", key), text)
        if usage is None and folder is not None and folder.count_tokens is not None:
            try:
                folder.count_tokens.load()  # so that a broken file is an error at start, and not of the first answer
            except ValueError as exc:
                raise PipelineMismatch(("chat", "tokenizer"), f"cannot be used: {exc}") from exc
        renamed = {str(name): field for name, field in spec.parameters.items()}
        for parameter, field in renamed.items():
            named(field, self._fields, "an input or parameter of the pipeline", "parameters", parameter)
        self._by_parameter = {name: name for name in self._fields if name not in renamed.values()} | renamed
        """Every field is known by its own name, if it has no name of OpenAI's."""
        self.completions = self._text_form(spec.completions, "completions") if spec.completions else None
        self.chat = self._chat_form(spec.chat) if spec.chat else None
        self.embeddings = self._embeddings_form(spec.embeddings, config) if spec.embeddings else None

    def _text_form(self, spec: CompletionsSpec, key: str) -> TextForm:
        whole = self._spec
        prompt = named(spec.prompt, self._inputs, "an input of the pipeline", key, "prompt")
        self._check_text(prompt, key, "prompt")
        self._check_text(self._output(spec.text, key, "text"), key, "text")
        if whole.finish_reason is not None:
            output = self._output(whole.finish_reason, "finish_reason")
            if not output.is_count:
                self._check_text(output, "finish_reason")
        if whole.logprobs is not None:
            named(whole.logprobs.parameter, self._fields, "a parameter of the pipeline", "logprobs", "parameter")
            output = self._output(whole.logprobs.output, "logprobs", "output")
            if output.spec.kind != "json" or not output.is_bare:
                text = f"'{output.name}' must have kind: json and one element"
                raise PipelineMismatch(("logprobs", "output"), text)
        if (guided := whole.guided) is not None:
            type_ = "string" if guided.member is None else "object"
            if self._parameter(guided.parameter, "guided", "parameter").spec.type != type_:
                raise PipelineMismatch(("guided", "parameter"), f"'{guided.parameter}' must have type: {type_}")
            for name, value in guided.also.items():
                with mismatch_at("guided", "also", name):
                    self._parameter(name).converted(value)
        default = FINISH_REASON if FINISH_REASON in self._outputs else None
        return TextForm(
            prompt=spec.prompt,
            text=spec.text,
            finish_reason=whole.finish_reason or default,
            openai=whole,
            field_by_parameter=self._settable(spec.prompt, key),
            tokenizer=whole.chat.folder if whole.chat else None,
            prompt_tensor=prompt.tensor.name,
        )

    def _chat_form(self, spec: ChatSpec) -> TextForm:
        template, given, field = _template_of(spec), self._spec.reasoning, self._parameters.get(SKIPS_SPECIAL_TOKENS)
        reasoning: Reasoning | None = (given[0], given[1]) if isinstance(given, list) else given
        keeps = self._spec.format_of_special_tokens is not None and field is not None and field.spec.type == "boolean"
        return replace(
            self._text_form(spec, "chat"),
            template=template,
            tools=self._spec.tools,
            reasoning=None if reasoning == "none" else reasoning,
            special_tokens=SKIPS_SPECIAL_TOKENS if keeps else None,
            images=self._images(spec, template),
        )

    def _images(self, spec: ChatSpec, template: ChatTemplate) -> ImagesForm | None:
        """The input for images, if the template has places for them.

        A template without such places is an error if the pipeline needs images or says how they are written: most
        models of a backend with an optional input for images have none.
        """
        usable = {
            name: field
            for name, field in self._inputs.items()
            if field.spec.kind == "image" and (field.is_bare or (not field.batched and len(field.tensor.dims) == 1))
        }
        name = spec.images or (next(iter(usable)) if len(usable) == 1 else None)
        if name is None:
            if spec.image_marker is not None:
                text = "must name the input for the images, because not exactly one input has kind: image"
                raise PipelineMismatch(("chat", "images"), text)
            return None
        field = named(name, usable, "an image or a list of images", "chat", "images")
        if not template.takes_images:
            if spec.images is None and not field.is_required:
                return None
            text = f"is required: the chat template has no place for the images of '{name}'"
            raise PipelineMismatch(("chat", "image_marker"), text)
        size = 1 if field.is_bare else field.tensor.dims[0]
        most = spec.max_images if size == -1 else min(size, spec.max_images)
        return ImagesForm(name, most, field.is_bare, may_be_empty=field.is_required and size == -1)

    def _embeddings_form(self, spec: EmbeddingsSpec, config: ModelConfig) -> EmbeddingsForm:
        parameter = self._parameters.get(spec.input)
        if parameter is None or parameter.spec.type not in ("string", "text_or_tokens"):
            text = named(spec.input, self._inputs, "an input of the pipeline", "embeddings", "input")
            self._check_text(text, "embeddings", "input")
        if config.decoupled and config.max_batch_size:
            raise PipelineMismatch(("embeddings",), "requires a model that is not decoupled or does not batch")
        output = self._output(spec.embedding, "embeddings", "embedding")
        is_vector = output.tensor.datatype in FLOAT_DATATYPES and output.depth == 1
        if not is_vector and not (output.spec.kind == "json" and output.is_bare):
            fault = f"'{spec.embedding}' is not a list of floating-point numbers, and not of kind: json"
            raise PipelineMismatch(("embeddings", "embedding"), fault)
        texts = self._inputs[spec.input].tensor if spec.input in self._inputs else None
        is_batched = texts is not None and texts.datatype == BYTES and config.max_batch_size > 0
        return EmbeddingsForm(
            input=spec.input,
            takes_tokens=parameter is not None and parameter.spec.type == "text_or_tokens",
            tensor=texts.name if texts is not None and is_batched else None,
            embedding=spec.embedding,
            length=output.tensor.dims[-1] if is_vector else -1,
            field_by_parameter=self._settable(spec.input, "embeddings"),
        )

    def _settable(self, prompt: str, key: str) -> dict[str, str]:
        others = {prompt, ADAPTER, self._spec.logprobs.parameter if self._spec.logprobs else None}
        names = {name: field for name, field in self._by_parameter.items() if field not in others}
        if key == "chat" and "max_tokens" in names:
            names.setdefault("max_completion_tokens", names["max_tokens"])
        return names

    def _parameter(self, name: str, *location: str) -> ParameterField:
        return named(name, self._parameters, "a parameter of the pipeline", *location)

    def _output(self, name: str, *location: str) -> OutputField:
        return named(name, self._outputs, "an output of the pipeline", *location)

    def _check_text(self, field: InputField | OutputField, *location: str) -> None:
        if field.spec.kind != "text" or not field.is_bare:
            raise PipelineMismatch(location, f"'{field.name}' must be a single text: kind: text with one element")


def _template_of(spec: ChatSpec) -> ChatTemplate:
    """From a folder it takes the template ``default``, and ``tool_use`` for conversations with tools."""
    folder = spec.folder
    if folder is None:
        with mismatch_at("chat", "template" if spec.template is not None else "template_text"):
            return ChatTemplate(spec.template_text or "", spec.variables, spec.strips_bos, spec.image_marker)
    variables = {**folder.special_tokens, **spec.variables}

    def made(name: str, tool_use: ChatTemplate | None = None) -> ChatTemplate:
        (text, source), is_tool_use = folder.templates[name], name == "tool_use"
        try:
            return ChatTemplate(text, variables, spec.strips_bos, spec.image_marker, tool_use, has_tools=is_tool_use)
        except ValueError as exc:
            raise PipelineMismatch(("chat", "tokenizer"), f"cannot be used: {source} {exc}") from exc

    return made("default", made("tool_use") if "tool_use" in folder.templates else None)


REASONING = "reasoning"
"""The output of a chat pipeline under ``/v1/pipelines`` with what a model writes before its text."""


def reasoning_output(openai: OpenAIMapping | None, outputs: Sequence[OutputField]) -> OutputField | None:
    """Returns None for a pipeline without ``openai: reasoning``, or with an own output of this name."""
    chat = None if openai is None else openai.chat
    if chat is None or chat.reasoning is None or any(field.name == REASONING for field in outputs):
        return None
    field = copy(next(field for field in outputs if field.name == chat.text))
    field.name, field.is_reasoning = REASONING, True
    field.spec = field.spec.model_copy(update={"description": "What the model wrote before the text."})
    return field


class Division:
    """Divides the text of one answer into its reasoning and the rest, for any division of the text into pieces."""

    def __init__(self, chat: TextForm, request: InferenceRequest) -> None:
        self._text = chat.text
        tensors = (each.array for each in request.inputs if each.name == chat.prompt_tensor and each.array.size)
        prompt = bytes(next((array.flat[-1] for array in tensors), b""))[-PROMPT_END:].decode("utf-8", "replace")
        parser = parser_of(None, {}, chat.reasoning, prompt)
        assert parser is not None
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
        return {self._text: "".join(part.text for part in parts if part.kind == "text"), REASONING: reasoning}
