"""Reads a form with many files while it arrives: the first parts of the request run before the last file is there.

Only where the rest of the body can change nothing about the first parts: the files are the pipeline's only input, and
every other field came before them. A body that turns out to be invalid later fails the whole request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import islice
from typing import Any

from app.api.bodies import ArrivingBody, check_no_query, media_type_of
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.pipelines.forms import MAX_PARTS, FormParser, Part, check_given_once
from app.api.pipelines.reading import read_inference
from app.core.errors import FieldProblem, InvalidInput
from app.core.inference import Deadline, InferenceRequest
from app.pipelines.pipeline import Pipeline

Beginning = tuple[InferenceRequest, AsyncIterator[InferenceRequest] | None]
"""The request of the first part and those of the further parts; or the whole request and None."""


async def read_beginning(exchange: Exchange, pipeline: Pipeline, limits: Limits, deadline: Deadline) -> Beginning:
    """Reads a request until its first part can run. Raises the client errors of ``app.core.errors``."""
    form = _form_of(exchange, pipeline, limits.of(pipeline))
    if form is None:
        return await read_inference(exchange, pipeline, limits, deadline), None
    while not form.has_first_part and not form.body.is_complete:
        await form.read()
    if form.body.is_complete:
        return form.whole(), None
    return form.next_part(), form.further_parts()


def _form_of(exchange: Exchange, pipeline: Pipeline, limits: Limits) -> "_ArrivingForm | None":
    content_type = exchange.header(b"content-type") or ""
    is_form = media_type_of(content_type) == "multipart/form-data"
    if not is_form or len(pipeline.inputs) != 1 or not pipeline.inputs[0].is_list_of_raw_files:
        return None
    check_no_query(exchange)
    parser = FormParser(content_type, MAX_PARTS + pipeline.max_items)
    body = ArrivingBody.of(exchange, limits)
    return None if body is None else _ArrivingForm(pipeline, parser, body)


class _ArrivingForm:
    def __init__(self, pipeline: Pipeline, parser: FormParser, body: ArrivingBody) -> None:
        self.body = body
        self._pipeline = pipeline
        self._parser = parser
        self._field = pipeline.inputs[0].name
        self._files = deque[bytes]()
        """Those that are not in a part yet."""
        self._count = 0
        """Of all files so far."""
        self._others: list[Part] = []
        self._values: dict[str, Any] | None = None
        """The decoded fields of the first part."""

    async def read(self) -> None:
        """Reads some more of the body. Raises the client errors of ``app.core.errors``."""
        content = await self.body.more()
        parts = self._parser.parts_in(content)
        while some := list(islice(parts, self._pipeline.call_items)):
            self._sort(some)
            await asyncio.sleep(0)  # other requests do not wait for all of them
        if self.body.is_complete:
            self._parser.check_ended()
            self.body.forget()  # the files were copied
        else:
            self.body.drop(self._parser.drop_read())

    def _sort(self, parts: list[Part]) -> None:
        """Raises InvalidInput."""
        others = [part for part in parts if part[0] != self._field]
        files = [content for name, content in parts if name == self._field]
        self._others += others
        self._files += files
        self._count += len(files)
        if self._values is not None and others:
            self._check_others()
        if self._values is not None and self._count > self._pipeline.max_items:
            raise self._too_many()

    def _check_others(self) -> None:
        """Raises InvalidInput for a field that comes after the first part ran: it is given twice, or unknown."""
        self._pipeline.reader.from_form(self._contents([b""]))

    def _too_many(self) -> InvalidInput:
        most = self._pipeline.max_items
        problem = FieldProblem("batch", f"has more than {most} items; expected 1 to {most}")
        return InvalidInput(f"'{problem.field}' {problem.problem}.", errors=[problem])

    def _contents(self, files: list[bytes]) -> dict[str, bytes | list[bytes]]:
        """The content of each field. Raises InvalidInput."""
        check_given_once(name for name, _ in self._others)
        return {**dict(self._others), **({self._field: files} if files else {})}

    @property
    def has_first_part(self) -> bool:
        """Whether there are more files than a call takes, and nothing can come but files."""
        given = {name for name, _ in self._others} | {self._field}
        return len(self._files) > self._pipeline.call_items and given >= set(self._pipeline.reader.names)

    def whole(self) -> InferenceRequest:
        """The request of a body that is complete. Raises InvalidInput or InvalidRequest."""
        return self._pipeline.request_of_form(self._contents(list(self._files)))

    def next_part(self) -> InferenceRequest:
        """Raises InvalidInput or InvalidRequest."""
        count = min(self._pipeline.call_items, len(self._files))
        files = [self._files.popleft() for _ in range(count)]
        if self._values is None:
            self._values = self._pipeline.reader.from_form(self._contents(files))
        return self._pipeline.request_of({**self._values, self._field: files})

    async def further_parts(self) -> AsyncGenerator[InferenceRequest]:
        """Raises the client errors of ``app.core.errors``."""
        while self._files or not self.body.is_complete:
            if len(self._files) >= self._pipeline.call_items or self.body.is_complete:
                yield self.next_part()
            else:
                await self.read()
