"""The conversion of a model's responses to the caller's values.

The items of a ``Batch`` are the rows of the first dimension of each tensor. The model takes them in parts, which have
views of the request's arrays, and the answers of all parts are joined to one array for each output.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from app.core.errors import ContractViolation, FieldProblem, GatewayError, ModelChanged
from app.core.inference import Array, InferenceRequest, InferenceResponse, new_request_id

Values = dict[str, Any]


class Ending(Struct, frozen=True):
    """The end of an answer: the reason of an early exit, and the outputs that must still be written."""

    early_exit: str | None = None
    """For a batch: the first reason, if every item has one."""
    outputs: Sequence[Values] = ()
    early_exits: Sequence[str | None] | None = None
    """For a batch: the reason of each item. None for any other answer."""

    @property
    def shown_exit(self) -> str | Sequence[str | None] | None:
        """What callers see as ``early_exit``."""
        return self.early_exit if self.early_exits is None else self.early_exits


class WholeAnswer(Struct, frozen=True):
    """An answer as it is sent to the caller. ``body``: JSON; empty if the answer is a stream."""

    body: bytes
    early_exit: str | None = None


class Tokens(Struct):
    """The numbers of tokens so far. ``prompt``: None if it is not known. ``reasoning``: of the completion; the same."""

    prompt: int | None = None
    completion: int = 0
    reasoning: int | None = None

    def __add__(self, other: "Tokens") -> "Tokens":
        known = [each.prompt for each in (self, other) if each.prompt is not None]
        return Tokens(sum(known) if known else None, self.completion + other.completion)


class Answer:
    """Converts the responses of one request, without I/O. After an error of :meth:`add`, add no further response.

    The answer of a stream writes an output for each response. A whole answer writes its only output at the end. This
    base class writes none.
    """

    @property
    def has_enough(self) -> bool:
        """Whether the caller does not need further responses."""
        return False

    @property
    def tokens(self) -> Tokens | None:
        """The tokens of a language model; None if nothing counts them."""
        return None

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the output of a response; None if nothing is to be written. Raises GatewayError."""
        return None

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Called after the last response, or after an error. Raises the error for the caller."""
        if error is not None:
            raise error
        return Ending()

    end: Callable[[GatewayError | None], Awaitable[Ending]] | None = None
    """Instead of :meth:`finish`, if that takes long: lets other requests run in the meantime."""


class BatchPart(Struct, frozen=True, eq=False):
    """A call for some of the items."""

    items: range
    request: InferenceRequest


class PartEnd(InferenceResponse, frozen=True, eq=False):
    """The last response of a part, or an end without outputs."""

    error: GatewayError | None = None
    """Why the part failed."""


def items_of(request: InferenceRequest) -> int:
    """The number of items: the first dimension, which is the same of every input."""
    return request.inputs[0].shape[0] if request.inputs else 1


def ranges_of(count: int, call_items: int) -> list[range]:
    """The items of each call. ``call_items``: the most items of a call."""
    return [range(start, min(start + call_items, count)) for start in range(0, count, call_items)]


def part_of(request: InferenceRequest, items: range) -> InferenceRequest:
    """The request for some of the items, with views of its arrays. The first part keeps the request's id."""
    inputs = tuple(replace(each, array=each.array[items.start : items.stop]) for each in request.inputs)
    return replace(request, inputs=inputs, request_id=new_request_id() if items.start else request.request_id)


class Batch(Answer):
    """The answer of a request whose items run as parts, each with an answer of its own.

    ``choice`` of each response is the number of the first item of its part, whose last one is a :class:`PartEnd`.
    """

    def __init__(self, request: InferenceRequest, call_items: int, count: int | None = None) -> None:
        """``call_items``: the most items of a call. ``count``: of all items; None for those of the request."""
        self.count = items_of(request) if count is None else count
        self._request = request
        self._ranges = ranges_of(self.count, call_items)
        self._running: dict[int, tuple[BatchPart, Answer]] = {}
        self._tokens: Tokens | None = None
        self._version = ""
        """The version of the model that answered every part so far. A response without outputs may have none."""

    def __len__(self) -> int:
        """The number of parts that :meth:`parts` yields."""
        return len(self._ranges)

    @property
    def tokens(self) -> Tokens | None:
        """The tokens of the parts that have ended."""
        return self._tokens

    def parts(self) -> Iterator[BatchPart]:
        for items in self._ranges:
            part = BatchPart(items, self.request_of(items))
            self._running[items.start] = part, self.answer_of(part)
            yield part

    def request_of(self, items: range) -> InferenceRequest:
        return part_of(self._request, items)

    def answer_of(self, part: BatchPart) -> Answer:
        """The answer of one part."""
        raise NotImplementedError

    def put(self, items: range, answer: Answer, ending: Ending) -> Values | None:
        """Takes the end of a part. Returns the output to write, None for none. Raises ContractViolation."""
        raise NotImplementedError

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises ModelChanged, and the errors of the part's answer, which name its items."""
        part, answer = self._running[response.choice]
        try:
            values = None
            if response.outputs or not isinstance(response, PartEnd):
                self._version = self._version or response.version
                if response.version not in ("", self._version):
                    versions = f"{self._version} and {response.version}"
                    raise ModelChanged(f"The parts of the request were answered by the versions {versions}.")
                values = answer.add(response)
            if isinstance(response, PartEnd):
                del self._running[response.choice]
                ending = answer.finish(response.error)
                if answer.tokens is not None:
                    self._tokens = answer.tokens if self._tokens is None else self._tokens + answer.tokens
                values = self.put(part.items, answer, ending)
            return values
        except GatewayError as exc:
            if len(self) > 1:
                first, last = part.items[0], part.items[-1]
                name = f"items[{first}]" if first == last else f"items[{first}..{last}]"
                exc.errors = (FieldProblem(name, "failed"), *exc.errors)
            raise


def check_rows(tensor: str, rows: int, items: range) -> None:
    """Raises ContractViolation if an output of a part does not have one row for each item."""
    if rows != len(items):
        raise ContractViolation(
            f"Output '{tensor}' has {rows} rows for {len(items)} items, so the parts of the request cannot be joined.",
            tensor=tensor,
            hint="Send at most as many items as the model takes at a time, or correct the model: its outputs need one "
            "row for each item.",
        )


def joined_rows(pieces: Sequence[Array | Sequence[Any]]) -> Array | Sequence[Any]:
    """The rows of all pieces: one array, or a list of rows if they are of different shapes or lists."""
    if len(pieces) == 1:
        return pieces[0]
    arrays = [each for each in pieces if isinstance(each, np.ndarray)]
    if len(arrays) == len(pieces) and len({each.shape[1:] for each in arrays}) == 1:
        return np.concatenate(arrays)
    return [row for piece in pieces for row in piece]
