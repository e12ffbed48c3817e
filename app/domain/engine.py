"""The port to an inference server."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol

from app.domain.deadline import Deadline
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, ModelState

Document = Literal["metadata", "config", "stats"]
"""The documents about a model, as named by the Open Inference Protocol."""


class Engine(Protocol):
    """Every method raises only errors of :mod:`app.domain.errors`."""

    def states(self) -> Mapping[str, str]:
        """Returns the state of each server by address, in one word. Empty if the engine has one server."""
        return {}

    def absences(self, model: str, version: str = "") -> Mapping[str, str]:
        """Where the model is not called, and why not: address -> ``not_ready`` or ``other_signature``."""
        return {}

    async def is_live(self) -> bool:
        """Whether the server answers. Never raises."""

    async def models(self) -> Sequence[ModelState]:
        """Returns the repository index."""

    async def model_ready(self, model: str, version: str = "") -> bool: ...

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        """Returns the model's current configuration. Raises ModelNotReady."""

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        """Returns a document about the model, as the JSON of the HTTP endpoint. Raises UnknownModel.

        ``stats`` covers all models if ``model`` is empty.
        """

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Sends a request and returns its response. Cancelling the awaiting task cancels the call."""

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        """Sends a request and yields its responses as they arrive. Closing the generator cancels the call."""
