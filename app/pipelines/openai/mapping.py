"""``openai:`` of a pipeline, compiled against the pipeline's fields."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from app.core.inference import BYTES, FLOAT_DATATYPES, INTEGER_DATATYPES
from app.core.model import ModelConfig
from app.core.text import nearest
from app.pipelines.inputs import InputField
from app.pipelines.mismatch import PipelineMismatch, mismatch_at, tensor_named
from app.pipelines.openai.spec import (
    ChatSpec,
    CompletionsSpec,
    EmbeddingsSpec,
    GuidedSpec,
    LogprobsSpec,
    OpenAISpec,
    UsageSpec,
)
from app.pipelines.openai.template import ChatTemplate, TemplateOptions
from app.pipelines.openai.tokenizer import TokenizerFolder
from app.pipelines.openai.tool_calls.formats import Reasoning, ToolFormat
from app.pipelines.outputs import OutputField
from app.pipelines.parameters import ParameterField
from app.pipelines.spec import ADAPTER

FINISH_REASON = "finish_reason"
SKIPS_SPECIAL_TOKENS = "skip_special_tokens"
"""vLLM's parameter: false keeps special tokens in the text."""

Field = InputField | ParameterField


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
    usage: UsageSpec | None
    field_by_parameter: Mapping[str, str]
    """OpenAI's name -> the pipeline's, for every field that a request may set in addition to the prompt."""
    ignored: frozenset[str] = frozenset()
    """OpenAI's names of fields that the model does not have and requests may set."""
    template: ChatTemplate | None = None
    logprobs: LogprobsSpec | None = None
    tokenizer: TokenizerFolder | None = None
    """Of ``chat``; counts tokens, if it can."""
    guided: GuidedSpec | None = None
    tools: ToolFormat | None = None
    reasoning: Reasoning | None = None
    """How the model writes tool calls and reasoning. Only of ``chat``; None if it does not."""
    special_tokens: str | None = None
    """The parameter that keeps special tokens in the text, if these formats need it and there is one."""
    images: ImagesForm | None = None
    """Only of ``chat``; None if messages cannot have images."""


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
    counts_tokens: bool
    field_by_parameter: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenAIMapping:
    completions: TextForm | None = None
    chat: TextForm | None = None
    embeddings: EmbeddingsForm | None = None


def compile_openai(
    spec: OpenAISpec, config: ModelConfig, fields: Sequence[Field], outputs: Sequence[OutputField]
) -> OpenAIMapping:
    """Raises PipelineMismatch."""
    _check_usage(spec.usage, config)
    if spec.usage is None and spec.chat is not None and spec.chat.folder is not None:
        _load_counter(spec.chat.folder)
    names = _Names(spec, fields, outputs)
    return OpenAIMapping(
        completions=names.text_form(spec.completions, "completions") if spec.completions else None,
        chat=names.text_form(spec.chat, "chat") if spec.chat else None,
        embeddings=names.embeddings_form(spec.embeddings, config) if spec.embeddings else None,
    )


class _Names:
    """The pipeline's fields by name, as ``openai:`` refers to them. Every method raises PipelineMismatch."""

    def __init__(self, spec: OpenAISpec, fields: Sequence[Field], outputs: Sequence[OutputField]) -> None:
        self._spec = spec
        self._fields = {field.name: field for field in fields}
        self._outputs = {field.name: field for field in outputs}
        self._by_parameter = self._field_by_parameter()

    def text_form(self, spec: CompletionsSpec, key: str) -> TextForm:
        self._check_text_input(spec.prompt, (key, "prompt"))
        self._check_text_output(spec.text, (key, "text"))
        form = TextForm(
            prompt=spec.prompt,
            text=spec.text,
            finish_reason=self._finish_reason(),
            usage=self._spec.usage,
            field_by_parameter=self._settable(spec.prompt, key),
            ignored=frozenset(self._spec.ignored),
            template=_template_of(spec, key) if isinstance(spec, ChatSpec) else None,
            logprobs=self._logprobs(),
            tokenizer=self._spec.chat.folder if self._spec.chat else None,
            guided=self._guided(),
        )
        return self._with_images(self._with_calls(form), spec) if isinstance(spec, ChatSpec) else form

    def _with_images(self, form: TextForm, spec: ChatSpec) -> TextForm:
        """Adds the input for images, if the template has places for them.

        A template without such places is an error if the pipeline needs images or says how they are written: most
        models of a backend with an optional input for images have none.
        """
        assert form.template is not None
        field = self._image_input(spec)
        if field is None:
            return form
        if not form.template.takes_images:
            if spec.images is None and not field.is_required:
                return form
            text = f"is required: the chat template has no place for the images of '{field.name}'"
            raise _mismatch(("chat", "image_marker"), text)
        size = 1 if field.is_bare else field.tensor.dims[0]
        most = spec.max_images if size == -1 else min(size, spec.max_images)
        may_be_empty = field.is_required and size == -1
        return replace(form, images=ImagesForm(field.name, most, field.is_bare, may_be_empty))

    def _image_input(self, spec: ChatSpec) -> InputField | None:
        inputs = [each for each in self._fields.values() if isinstance(each, InputField) and each.spec.kind == "image"]
        usable = {
            each.name: each for each in inputs if each.is_bare or (not each.batched and len(each.tensor.dims) == 1)
        }
        if spec.images is not None and spec.images not in usable:
            text = f"'{spec.images}' is not an image or a list of images{nearest(spec.images, list(usable))}"
            raise _mismatch(("chat", "images"), text)
        if spec.images is None and spec.image_marker is not None and len(usable) != 1:
            text = "must name the input for the images, because not exactly one input has kind: image"
            raise _mismatch(("chat", "images"), text)
        return usable[spec.images] if spec.images else next(iter(usable.values())) if len(usable) == 1 else None

    def _with_calls(self, form: TextForm) -> TextForm:
        given = self._spec.reasoning
        reasoning: Reasoning | None = (given[0], given[1]) if isinstance(given, list) else given
        reasoning = None if reasoning == "none" else reasoning
        field = self._fields.get(SKIPS_SPECIAL_TOKENS)
        has_parameter = isinstance(field, ParameterField) and field.spec.type == "boolean"
        is_needed = self._spec.format_of_special_tokens is not None
        special = SKIPS_SPECIAL_TOKENS if is_needed and has_parameter else None
        return replace(form, tools=self._spec.tools, reasoning=reasoning, special_tokens=special)

    def embeddings_form(self, spec: EmbeddingsSpec, config: ModelConfig) -> EmbeddingsForm:
        field = self._fields.get(spec.input)
        if not isinstance(field, ParameterField) or field.spec.type not in ("string", "text_or_tokens"):
            self._check_text_input(spec.input, ("embeddings", "input"))
        if config.decoupled and config.max_batch_size:
            raise _mismatch(("embeddings",), "requires a model that is not decoupled, or has no batches")
        output = self._output(spec.embedding, ("embeddings", "embedding"))
        is_vector = output.tensor.datatype in FLOAT_DATATYPES and output.depth == 1
        if not is_vector and not (output.spec.kind == "json" and output.is_bare):
            text = f"'{spec.embedding}' is not a list of floating-point numbers, and has not kind: json"
            raise _mismatch(("embeddings", "embedding"), text)
        texts = field.tensor if isinstance(field, InputField) and config.max_batch_size > 0 else None
        batched = texts.name if texts is not None and texts.datatype == BYTES else None
        return EmbeddingsForm(
            input=spec.input,
            takes_tokens=isinstance(field, ParameterField) and field.spec.type == "text_or_tokens",
            tensor=batched,
            embedding=spec.embedding,
            length=output.tensor.dims[-1] if is_vector else -1,
            counts_tokens=self._spec.usage is not None,
            field_by_parameter=self._settable(spec.input, "embeddings"),
        )

    def _field_by_parameter(self) -> dict[str, str]:
        """Every field is known by its own name, if it has no name of OpenAI's."""
        renamed = {str(name): field for name, field in self._spec.parameters.items()}
        for name, field in renamed.items():
            if field not in self._fields:
                text = f"'{field}' is not an input or parameter of the pipeline{nearest(field, list(self._fields))}"
                raise _mismatch(("parameters", name), text)
        return {name: name for name in self._fields if name not in renamed.values()} | renamed

    def _settable(self, prompt: str, key: str) -> dict[str, str]:
        others = {prompt, ADAPTER, self._spec.logprobs.parameter if self._spec.logprobs else None}
        names = {name: field for name, field in self._by_parameter.items() if field not in others}
        if key == "chat" and "max_tokens" in names:
            names.setdefault("max_completion_tokens", names["max_tokens"])
        return names

    def _check_text_input(self, name: str, location: tuple[str, str]) -> None:
        field = self._fields.get(name)
        inputs = [each.name for each in self._fields.values() if isinstance(each, InputField)]
        if not isinstance(field, InputField):
            raise _mismatch(location, f"'{name}' is not an input of the pipeline{nearest(name, inputs)}")
        if field.spec.kind != "text" or not field.is_bare:
            raise _mismatch(location, f"'{name}' must be a single text: kind: text with one element")

    def _check_text_output(self, name: str, location: tuple[str, ...]) -> None:
        field = self._output(name, location)
        if field.spec.kind != "text" or not field.is_bare:
            raise _mismatch(location, f"'{name}' must be a single text: kind: text with one element")

    def _output(self, name: str, location: tuple[str, ...]) -> OutputField:
        if name not in self._outputs:
            raise _mismatch(location, f"'{name}' is not an output of the pipeline{nearest(name, list(self._outputs))}")
        return self._outputs[name]

    def _logprobs(self) -> LogprobsSpec | None:
        spec = self._spec.logprobs
        if spec is None:
            return None
        if spec.parameter not in self._fields:
            text = f"'{spec.parameter}' is not a parameter of the pipeline{nearest(spec.parameter, list(self._fields))}"
            raise _mismatch(("logprobs", "parameter"), text)
        output = self._output(spec.output, ("logprobs", "output"))
        if output.spec.kind != "json" or not output.is_bare:
            raise _mismatch(("logprobs", "output"), f"'{spec.output}' must have kind: json and one element")
        return spec

    def _guided(self) -> GuidedSpec | None:
        spec = self._spec.guided
        if spec is None:
            return None
        self._check_parameter(spec.parameter, "string" if spec.member is None else "object", ("guided", "parameter"))
        for name, value in spec.also.items():
            location = ("guided", "also", name)
            field = self._check_parameter(name, None, location)
            try:
                field.converted(value)
            except ValueError as exc:
                raise _mismatch(location, str(exc)) from exc
        return spec

    def _check_parameter(self, name: str, type_: str | None, location: tuple[str, ...]) -> ParameterField:
        parameters = [each.name for each in self._fields.values() if isinstance(each, ParameterField)]
        field = self._fields.get(name)
        if not isinstance(field, ParameterField):
            raise _mismatch(location, f"'{name}' is not a parameter of the pipeline{nearest(name, parameters)}")
        if type_ is not None and field.spec.type != type_:
            raise _mismatch(location, f"'{name}' must have type: {type_}")
        return field

    def _finish_reason(self) -> str | None:
        name = self._spec.finish_reason
        if name is None:
            return FINISH_REASON if FINISH_REASON in self._outputs else None
        if not self._output(name, ("finish_reason",)).is_count:
            self._check_text_output(name, ("finish_reason",))
        return name


def _template_of(spec: ChatSpec, key: str) -> ChatTemplate:
    if spec.folder is not None:
        return _template_in(spec.folder, spec, key)
    name = "template" if spec.template is not None else "template_text"
    with mismatch_at("openai", key, name):
        return ChatTemplate(spec.template_text or "", spec.variables, _options_of(spec))


def _options_of(spec: ChatSpec) -> TemplateOptions:
    return TemplateOptions(spec.strips_bos, spec.image_marker)


def _template_in(folder: TokenizerFolder, spec: ChatSpec, key: str) -> ChatTemplate:
    """The template ``default``, with ``tool_use`` for conversations with tools. Raises PipelineMismatch."""
    variables, options = {**folder.special_tokens, **spec.variables}, _options_of(spec)
    tool_use = None
    if "tool_use" in folder.named_templates:
        text = folder.named_templates["tool_use"]
        with _mismatch_in(folder, "tool_use", key):
            tool_use = ChatTemplate(text, variables, options, has_tools=True)
    with _mismatch_in(folder, "default", key):
        return ChatTemplate(folder.template, variables, options, tool_use=tool_use)


@contextmanager
def _mismatch_in(folder: TokenizerFolder, template: str, key: str) -> Iterator[None]:
    """Converts a ValueError about a template of the folder to a PipelineMismatch with its file and key."""
    try:
        yield
    except ValueError as exc:
        raise _mismatch((key, "tokenizer"), f"cannot be used: {folder.sources[template]} {exc}") from exc


def _load_counter(folder: TokenizerFolder) -> None:
    """Reads ``tokenizer.json`` now and not for the first answer, so that a broken file is an error at start.

    Raises PipelineMismatch.
    """
    try:
        if folder.count_tokens is not None:
            folder.count_tokens.load()
    except ValueError as exc:
        raise _mismatch(("chat", "tokenizer"), f"cannot be used: {exc}") from exc


def _check_usage(usage: UsageSpec | None, config: ModelConfig) -> None:
    for key, name in usage.model_dump(exclude_none=True, exclude={"completion_count"}).items() if usage else ():
        location = ("openai", "usage", key)
        tensor = tensor_named(config.outputs, name, location)
        if tensor.datatype not in INTEGER_DATATYPES:
            raise PipelineMismatch(location, f"'{name}' has datatype {tensor.datatype}; an integer type is needed")


def _mismatch(location: tuple[str, ...], text: str) -> PipelineMismatch:
    return PipelineMismatch(("openai", *location), text)
