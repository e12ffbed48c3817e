"""What the gateway needs of an inference server."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol

from app.domain.deadline import Deadline
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, ModelState

Document = Literal["metadata", "config", "stats"]
"""What a server says of a model, as the Open Inference Protocol names it."""


class Engine(Protocol):
    """Every method raises the errors of :mod:`app.domain.errors` and no others."""

    async def is_live(self) -> bool:
        """Whether the server answers at all; never raises."""

    async def models(self) -> Sequence[ModelState]:
        """The repository index."""

    async def model_ready(self, model: str, version: str = "") -> bool: ...

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        """The model's configuration as the server holds it now. Raises ModelNotReady."""

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        """What the server says of the model, as the JSON of its HTTP endpoint. Raises UnknownModel.

        ``stats``: of all models if ``model`` is empty.
        """

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """One request, one response. Cancelling the awaiting task cancels the call."""

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        """One request, its responses as they come. Closing the generator cancels the call."""
