"""One inference: what is asked of a model and what it answers."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.domain.tensor import Tensor
from app.domain.trace import TraceContext

Parameter = bool | int | float | str


def new_request_id() -> str:
    """128 random bits. Triton only ever sees ids made here: it echoes them in errors, and cancellation goes by them."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, eq=False)
class InferenceRequest:
    model: str
    inputs: tuple[Tensor, ...]
    version: str = ""
    """Empty: Triton's version policy chooses."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    request_id: str = field(default_factory=new_request_id)
    trace: TraceContext | None = None
    """Of the span that calls the model."""
    ends_by_hook: bool = False
    """Who gives it up says so to a ``cancel`` model too, and the stream then ends by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class InferenceResponse:
    """One response of any number that a decoupled model gives; an output that was not written is not in ``outputs``."""

    outputs: Mapping[str, Tensor]
    is_final: bool = True
