"""One inference: what is asked of a model and what it answers."""

from collections.abc import Mapping
from typing import Self

from msgspec import Struct, field
from msgspec.structs import replace

from app.domain.request_id import new_request_id
from app.domain.tensor import Tensor
from app.domain.trace import TraceContext

Parameter = bool | int | float | str


class RequestedOutput(Struct, frozen=True):
    """An output that the request asks for. ``classification``: the number of best classes to answer instead; or 0."""

    name: str
    classification: int = 0


class InferenceRequest(Struct, frozen=True, eq=False):
    """A request to a model. A Struct, because a frozen dataclass takes ten times as long to make and to copy."""

    model: str
    inputs: tuple[Tensor, ...]
    version: str = ""
    """Empty: Triton's version policy selects the version."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty: all outputs."""
    request_id: str = field(default_factory=new_request_id)
    """Always made here, never the caller's: Triton repeats the id in error texts, and cancellation uses the id."""
    trace: TraceContext | None = None
    """The trace context of the span that calls the model."""
    ends_by_hook: bool = False
    """Whether a ``cancel`` model is called when the request is abandoned: the stream then ends by itself."""

    def with_trace(self, trace: TraceContext | None) -> Self:
        return self if trace is self.trace else replace(self, trace=trace)

    def without_inputs(self) -> Self:
        """For what lives as long as a stream: the inputs may be large, and are sent at its start."""
        return replace(self, inputs=())

    def with_parameter(self, name: str, value: Parameter) -> Self:
        return replace(self, parameters={**self.parameters, name: value})


class InferenceResponse(Struct, frozen=True, eq=False):
    """One response; a decoupled model sends any number. An output that was not written is not in ``outputs``."""

    outputs: Mapping[str, Tensor]
    is_final: bool = True
    version: str = ""
    """The version of the model that answered."""
