"""A request whose body names its model: every POST of this dialect begins with :meth:`Door.open`.

A new address is a subclass of ``Door``: its part of ``openai:``, how its members become requests to the pipeline, and
its answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import msgspec

from app.api.bodies import Limits, check_size, off_loop, read_json_of_any
from app.api.call import Inference
from app.api.exchange import Exchange
from app.api.openai.members import Members, Neutral, problems_of, read_members, required, take
from app.api.openai.openai_models import checked_model
from app.core.errors import FieldProblem, UnknownPipeline
from app.core.inference import Deadline
from app.pipelines.body import Body, refused
from app.pipelines.openai_mapping import EmbeddingsForm, OpenAIMapping, TextForm
from app.pipelines.pipeline import Pipeline

Form = TypeVar("Form", bound=TextForm | EmbeddingsForm)
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class NamedRequest(Generic[Form]):
    """The members of a body and their model. It refers to the body: an answer must not keep it."""

    exchange: Exchange
    pipeline: Pipeline
    form: Form
    model_id: str
    """The pipeline's name, or ``name:adapter``."""
    body: memoryview
    members: Members
    neutral: Mapping[str, Neutral]
    name_by_field: dict[str, str]
    """The pipeline's fields -> the names under which the caller knows them."""

    async def read(
        self,
        read: Callable[[], Read],
        deadline: Deadline,
        files: Iterable[bytes] = (),
        *,
        is_slow: bool = False,
    ) -> Read:
        """Returns ``read()``; runs in a thread if the body or a file is large, or if it is slow."""
        largest = max((self.body, *(memoryview(file) for file in files)), key=len)
        return await off_loop(lambda _largest: read(), largest, self.exchange, deadline, is_slow=is_slow)

    def body_of(self, fields: Mapping[str, Body]) -> bytes:
        """Returns the pipeline's JSON body: ``fields``, and each member under its name in the pipeline.

        Other members are checked and omitted.

        Raises InvalidInput for members that the pipeline has no field for, and InvalidJson.
        """
        problems: list[FieldProblem] = []
        found: dict[str, Body] = dict(fields)
        for name, text in self.members.items():
            field = self.form.field_by_parameter.get(name)
            if field is None:
                problems += problems_of(name, text, self.neutral.get(name))
            elif field in found:
                problems.append(FieldProblem(name, "is given twice, under two names"))
            else:
                found[field] = text
                self.name_by_field[field] = name
        if problems:
            raise refused(problems)
        pieces: list[Body] = []
        for name, value in found.items():
            pieces += [b"," if pieces else b"{", msgspec.json.encode(name), b":", value]
        return b"".join([*pieces, b"}"])


class Door(ABC, Generic[Form]):
    """An address whose body names its model."""

    what: ClassVar[str]
    operation: ClassVar[str]
    """OpenTelemetry's name of what the address does."""
    neutral: ClassVar[Mapping[str, Neutral]]

    def __init__(self, inference: Inference, limits: Limits) -> None:
        self.inference = inference
        self.limits = limits

    @staticmethod
    @abstractmethod
    def form_of(openai: OpenAIMapping) -> Form | None:
        """Returns the part of ``openai:`` that the address serves; None if the pipeline does not serve it."""

    async def open(self, exchange: Exchange) -> NamedRequest[Form]:
        """Reads the members of the body and finds the named model. The request counts as work from here.

        Raises Forbidden, Draining, TooManyRequests, UnknownPipeline or ModelNotReady, and what is wrong with the body.
        """
        inference, limits = self.inference, self.limits
        exchange.record.transport = "unary"
        inference.workload.begin(exchange)
        inference.check_load_of_any(exchange, self._timeout_of)
        served = (each for each in inference.allowed(exchange) if self._timeout_of(each) is not None)
        body = await read_json_of_any(exchange, limits, served)
        members = await off_loop(read_members, body, exchange)
        model = take(members, "model", str, "")
        if not model:
            raise required("model")
        name = checked_model(exchange, inference.catalog, model)
        exchange.record.operation = self.operation
        pipeline = inference.admit(exchange, name, "unary")
        check_size(len(body), limits.of(pipeline))
        form = None if pipeline.openai is None else self.form_of(pipeline.openai)
        if form is None:
            raise UnknownPipeline(
                f"The model '{name}' does not serve {self.what}.",
                hint="`openai:` of the pipeline in gateway.yaml declares what it serves.",
            )
        names = {field: name for name, field in reversed(list(form.field_by_parameter.items()))}
        return NamedRequest(exchange, pipeline, form, model, body, members, self.neutral, names)

    def _timeout_of(self, pipeline: Pipeline) -> float | None:
        """The longest deadline of a request to the pipeline, whole or as a stream; None if it is not served."""
        is_served = pipeline.openai is not None and self.form_of(pipeline.openai) is not None
        return pipeline.longest_timeout_s if is_served else None
