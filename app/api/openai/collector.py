"""Collects the responses of one request: the text, its finish reason, and its token count."""

from collections.abc import Sequence
from typing import Any

from app.api.openai.rendering import Rendering
from app.api.openai.stop import StopMatcher
from app.api.openai.usage import TokenCount
from app.domain.errors import GatewayError
from app.domain.inference import InferenceRequest, InferenceResponse
from app.pipelines.collector import Collector, Ending, Result
from app.pipelines.openai.form import TextForm
from app.pipelines.pipeline import Pipeline

Values = dict[str, Any]


class TextCollector:
    """Has the methods of :class:`Collector`: :meth:`add` and :meth:`finish` make chunks, :meth:`result` one answer.

    The pipeline's own collector checks the contract and detects early exits, which become an empty text here.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        form: TextForm,
        request: InferenceRequest,
        rendering: Rendering,
        stops: Sequence[str] = (),
    ) -> None:
        self._form = form
        self._collector = Collector(pipeline, request)
        self._rendering = rendering
        self._matcher = StopMatcher(stops)
        self._count = TokenCount(form.usage)
        self._finish_reason = "stop"
        self._texts: list[str] = []

    @property
    def has_enough(self) -> bool:
        """Whether a stop text was found."""
        return self._matcher.has_stopped

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Collector.add`."""
        text = self._text_of(response)
        return self._rendering.chunk(text) if text else None

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`Collector.finish`."""
        text, early_exit = self._rest(error)
        chunks = [self._rendering.chunk(text)] if text else []
        return Ending(early_exit, [*chunks, *self._rendering.last_chunks(self._finish_reason, self._count.usage)])

    def join(self, response: InferenceResponse) -> None:
        """Raises the errors of :meth:`Collector.add`."""
        self._texts.append(self._text_of(response))

    def result(self, error: GatewayError | None = None) -> Result:
        """Raises the errors of :meth:`Collector.finish`."""
        text, early_exit = self._rest(error)
        whole = "".join([*self._texts, text])
        return Result(self._rendering.whole(whole, self._finish_reason, self._count.usage), early_exit)

    def _text_of(self, response: InferenceResponse) -> str:
        self._count.add(response)
        values = self._collector.add(response)
        return "" if values is None else self._matcher.add(self._read(values))

    def _rest(self, error: GatewayError | None) -> tuple[str, str | None]:
        """The end of the text, and the reason of an early exit."""
        if self._matcher.has_stopped:
            self._finish_reason = "stop"
            return "", None
        ending = self._collector.finish(error)
        pieces = [self._matcher.add(self._read(values)) for values in ending.outputs]
        return "".join([*pieces, self._matcher.rest()]), ending.early_exit

    def _read(self, values: Values) -> str:
        if self._form.finish_reason is not None and values[self._form.finish_reason]:
            self._finish_reason = "length" if values[self._form.finish_reason] == "length" else "stop"
        return values[self._form.text] or ""
