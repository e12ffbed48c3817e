"""Converts the body of a completion or chat completion to a request to the pipeline and the answer's options.

Every POST of this dialect begins with ``read_named_request``, which reads the members of the body and finds the named
model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from app.api.bodies import check_size, off_loop, read_json_of_any
from app.api.call import Inference
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.openai.chat_messages import Conversation, Image
from app.api.openai.choice_parts import AnswerReader
from app.api.openai.members import (
    NEUTRAL_OF_TEXTS,
    Members,
    body_of_fields,
    read_members,
    renamed,
    required,
    take,
)
from app.api.openai.openai_models import checked_model
from app.api.openai.response_format import FIELD as RESPONSE_FORMAT
from app.api.openai.response_format import LONGEST_WITHOUT_SCHEMA, take_format
from app.api.openai.tools import reader_of, take_tools, take_variables
from app.core.errors import FieldProblem, InvalidInput, UnknownPipeline
from app.core.inference import Deadline, InferenceRequest, new_request_id
from app.llm.answer_schema import AnswerSchema
from app.llm.tokenizer import COUNTED_AT_ONCE, TokenCounter
from app.pipelines.body import Body, refused
from app.pipelines.openai_mapping import OpenAIMapping, TextForm
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import ADAPTER

StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = Annotated[list[StopText], Meta(max_length=4)] | StopText


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


MAX_CHOICES = 16
"""Limit of ``n``: each choice is a request to the model."""
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
MAX_LOGPROBS = 20
"""Limit of the alternatives for a token: OpenAI's for chats."""
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
OneText = str | Annotated[list[str], Meta(min_length=1, max_length=1)]
KEEPS_STOP = "include_stop_str_in_output"
"""vLLM's field. The gateway also reads it, because it ends the text itself."""


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The caller's options for the answer.

    ``keeps_stop``: the text ends with the stop text. ``logprobs``: the number of alternatives for a token, or None.
    """

    stream: bool = False
    include_usage: bool = False
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    choices: int = 1
    echo: bool = False
    logprobs: int | None = None


class Prompt(Struct, frozen=True):
    """``text``: empty unless it is echoed. ``name``: of the caller's field.

    ``tokens``: if the gateway counts them. ``counter``: counts those of the answer then. ``reader``: makes what reads
    the calls and the reasoning of one choice; None if the answer is only text. ``schema``: checks the answer.
    ``reasoning_counter``: counts the tokens of the reasoning.
    """

    text: str
    name: str = "prompt"
    tokens: int | None = None
    counter: TokenCounter | None = None
    reader: Callable[[], AnswerReader] | None = None
    schema: AnswerSchema | None = None
    reasoning_counter: TokenCounter | None = None
    field_by_name: Mapping[str, str] = {}
    """The caller's field -> that of the pipeline which the gateway sets for it."""


def take_options(members: Members, form: TextForm, *, chat: bool) -> ResponseOptions:
    """Takes the members that the gateway itself reads. Raises InvalidInput or InvalidJson."""
    stream = take(members, "stream", bool, False)
    has_options = "stream_options" in members
    options = take(members, "stream_options", StreamOptions, StreamOptions())
    if has_options and not stream:
        raise refused([FieldProblem("stream_options", "is only allowed with stream: true")])
    echo = False if chat else take(members, "echo", bool, False)
    logprobs = _take_logprobs(members, chat=chat) if form.logprobs else None
    if echo and logprobs is not None:
        raise refused([FieldProblem("echo", "is not allowed with logprobs, because the model has none for the prompt")])
    return ResponseOptions(
        stream=stream,
        include_usage=bool(options.include_usage),
        stops=_stops_of(take(members, "stop", Stop, [])),
        keeps_stop=KEEPS_STOP in form.field_by_parameter and take(dict(members), KEEPS_STOP, bool, False),
        choices=take(members, "n", Choices, 1),
        echo=echo,
        logprobs=logprobs,
    )


def _take_logprobs(members: Members, *, chat: bool) -> int | None:
    """Returns the number of alternatives for a token. Raises InvalidInput or InvalidJson."""
    if not chat:
        return take(members, "logprobs", Logprobs, None)
    wanted = take(members, "logprobs", bool, False)
    most = take(members, "top_logprobs", Logprobs, 0)
    if most and not wanted:
        raise refused([FieldProblem("top_logprobs", "is only allowed with logprobs: true")])
    return most if wanted else None


def completion_requests(
    named: "NamedRequest", form: TextForm, options: ResponseOptions, _conversation: Conversation
) -> tuple[Prompt, Sequence[InferenceRequest]]:
    """Returns the prompt, and a request for each choice. Raises InvalidInput, InvalidRequest or InvalidJson."""
    prompt = named.members.pop("prompt", None)
    if prompt is None:
        raise required("prompt")
    text = ""
    if options.echo or counter_of(form, options):
        given = take({"prompt": prompt}, "prompt", OneText, "")
        text = given if isinstance(given, str) else given[0]
    of_caller = _Given("prompt", {form.prompt: prompt})
    return _prompt_of(text, "prompt", form, options), _requests_of(named, form, options, of_caller)


def chat_requests(
    named: "NamedRequest", form: TextForm, options: ResponseOptions, conversation: Conversation
) -> tuple[Prompt, Sequence[InferenceRequest]]:
    """Renders the messages to the prompt with the pipeline's chat template.

    Returns the prompt, and a request for each choice. Raises InvalidInput or InvalidJson.
    """
    assert form.template is not None
    tools, variables = take_tools(named.members, form), take_variables(named.members, form)
    format_ = take_format(named.members, form, tools)
    text = form.template.render(conversation.messages, tools.described, variables)
    conversation.messages.clear()  # frees the memory before the requests are made
    schema, name = (tools.schema, "tools") if format_.guided is None else (format_.guided, RESPONSE_FORMAT)
    guided = {} if schema is None else form.guided_fields(schema)
    prompt = replace(
        _prompt_of(text, "messages", form, options),
        reader=None if format_.guided else reader_of(form, tools, text),
        schema=format_.checked,
        reasoning_counter=_reasoning_counter_of(form, options),
        field_by_name={name: form.guided.parameter} if guided and form.guided else {},
    )
    fields: dict[str, Body] = {form.prompt: memoryview(msgspec.json.encode(text))}
    del text  # frees its memory too
    fields |= {name: msgspec.json.encode(value) for name, value in guided.items()}
    given = _Given("messages", fields, _images_of(conversation, form, named.members))
    return prompt, _requests_of(named, form, options, given)


def _prompt_of(text: str, name: str, form: TextForm, options: ResponseOptions) -> Prompt:
    counter = counter_of(form, options)
    tokens = None if counter is None else counter(text, add_special_tokens=True)
    return Prompt(text if options.echo else "", name, tokens, counter)


def _reasoning_counter_of(form: TextForm, options: ResponseOptions) -> TokenCounter | None:
    """Returns the counter for an answer that has usage. No model counts the tokens of its reasoning."""
    if form.tokenizer is None or form.reasoning is None or (options.stream and not options.include_usage):
        return None
    return form.tokenizer.count_tokens


def counter_of(form: TextForm, options: ResponseOptions) -> TokenCounter | None:
    """Returns the counter for an answer that has usage which the model does not count."""
    if form.tokenizer is None or form.usage is not None or (options.stream and not options.include_usage):
        return None
    return form.tokenizer.count_tokens


def _images_of(conversation: Conversation, form: TextForm, members: Members) -> Mapping[str, Any]:
    """Returns the value of the pipeline's input for images; nothing if it is absent, or a member of its own."""
    contents, images = [image.content for image in conversation.images], form.images
    if images is None:
        return {}
    is_member = any(field == images.input and name in members for name, field in form.field_by_parameter.items())
    if not contents and (is_member or not images.may_be_empty):
        return {}
    return {images.input: contents[0] if images.is_single else contents}


class _Given(Struct, frozen=True):
    """The values of the pipeline's fields that come from one member of the caller, ``name``.

    ``fields``: as JSON. ``images``: the input for images, if there are any.
    """

    name: str
    fields: Mapping[str, Body]
    images: Mapping[str, Any] = {}


def _requests_of(
    named: "NamedRequest",
    form: TextForm,
    options: ResponseOptions,
    given: _Given,
) -> Sequence[InferenceRequest]:
    """Returns a request for each choice. Choices have different seeds if the caller sets one."""
    names = form.field_by_parameter
    members = {name: text for name, text in named.members.items() if name in names or name not in form.ignored}
    if "max_completion_tokens" in members and "max_completion_tokens" in names:
        members.pop("max_tokens", None)  # the older name of the same limit
    fields = dict(given.fields)
    if options.stops and "stop" in names:
        fields[names["stop"]] = msgspec.json.encode(options.stops)
    if options.logprobs is not None and form.logprobs is not None:
        fields[form.logprobs.parameter] = msgspec.json.encode(options.logprobs)
    if form.special_tokens is not None and form.special_tokens not in members:
        fields[form.special_tokens] = b"false"
    if named.adapter:
        fields[ADAPTER] = msgspec.json.encode(named.adapter)

    def request_of(members: Members) -> InferenceRequest:
        body = body_of_fields(fields, members, names, NEUTRAL_OF_TEXTS)
        try:
            return named.pipeline.request_of_json(body, given.images)
        except InvalidInput as exc:
            own = {names[name]: name for name in [*members, "stop"] if name in names}
            raise renamed(exc, {**own, **dict.fromkeys((form.prompt, *given.images), given.name)}) from exc

    seed = take(dict(members), "seed", int, None) if options.choices > 1 and "seed" in names else None
    if seed is not None:
        seeds = [memoryview(msgspec.json.encode(seed + choice)) for choice in range(options.choices)]
        return [request_of({**members, "seed": each}) for each in seeds]
    request = request_of(members)
    return [request, *(replace(request, request_id=new_request_id()) for _ in range(options.choices - 1))]


def _stops_of(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


Form = TypeVar("Form")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """The members of a body and their model, before the members are decoded."""

    pipeline: Pipeline
    model_id: str
    """The pipeline's name, or ``name:adapter``."""
    body: memoryview
    members: Members

    @property
    def adapter(self) -> str:
        return self.model_id[len(self.pipeline.name) + 1 :]

    async def read(
        self,
        read: Callable[[], Read],
        exchange: Exchange,
        deadline: Deadline | None = None,
        images: Iterable[Image] = (),
        *,
        counts: bool = False,
    ) -> Read:
        """Returns ``read()``; runs in a thread if the body or an image is large, or has a schema for the answer.

        ``counts``: it counts the tokens of the body, which takes longer.
        """
        largest = max((self.body, *(memoryview(image.content) for image in images)), key=len)
        has_schema = len(self.members.get(RESPONSE_FORMAT, b"")) > LONGEST_WITHOUT_SCHEMA
        is_slow = has_schema or (counts and len(self.body) > COUNTED_AT_ONCE)
        return await off_loop(lambda _largest: read(), largest, exchange, deadline, is_slow=is_slow)


Pick = Callable[[OpenAIMapping], Form | None]
"""Returns the part of ``openai:`` that one address serves; None if the pipeline does not serve the address."""


async def read_named_request(
    exchange: Exchange, inference: Inference, limits: Limits, pick: Pick[Any], operation: str
) -> NamedRequest:
    """Reads the members of the body and finds the named model. The request counts as work from here.

    ``operation``: OpenTelemetry's name of what the address does.

    Raises Forbidden, Draining, TooManyRequests, UnknownPipeline or ModelNotReady, and what is wrong with the body.
    """
    exchange.record.transport = "unary"
    inference.workload.begin(exchange.work)
    inference.check_load_of_any(exchange, partial(_timeout_of, pick))
    served = (each for each in inference.allowed(exchange) if _timeout_of(pick, each) is not None)
    body = await read_json_of_any(exchange, limits, served)
    members = await off_loop(read_members, body, exchange)
    model = take(members, "model", str, "")
    if not model:
        raise required("model")
    name = checked_model(exchange, inference.catalog, model)
    exchange.record.operation = operation
    pipeline = inference.admit(exchange, name, "unary")
    check_size(len(body), limits.of(pipeline))
    return NamedRequest(pipeline, model, body, members)


def _timeout_of(pick: Pick[Any], pipeline: Pipeline) -> float | None:
    """Returns the longest deadline of a request to the pipeline, whole or as a stream; None if it is not served."""
    if pipeline.openai is None or pick(pipeline.openai) is None:
        return None
    return pipeline.longest_timeout_s


def form_of(pipeline: Pipeline, pick: Pick[Form], what: str) -> Form:
    """``what``: a description of the address. Raises UnknownPipeline."""
    form = None if pipeline.openai is None else pick(pipeline.openai)
    if form is None:
        raise UnknownPipeline(
            f"The model '{pipeline.name}' does not serve {what}.",
            hint="`openai:` of the pipeline in gateway.yaml declares what it serves.",
        )
    return form
