"""The port between a pipeline and a layer around the engine, which does something with the pipeline's requests."""

from collections.abc import Sequence

from msgspec import Struct

from app.core.engine import Engine
from app.core.inference import InferenceRequest


class LayerFault(Struct, frozen=True):
    """Why a layer does nothing for a pipeline. ``code``: of a finding. ``output``: the one at fault, or empty."""

    code: str
    text: str
    output: str = ""


class PipelineLayer:
    """A layer as one compiled pipeline uses it. This base class changes nothing."""

    needs_trial = False
    """Whether a version of the model answered that no trial has seen."""
    fault: LayerFault | None = None

    def extended(self, request: InferenceRequest) -> InferenceRequest:
        """Returns the request with the layer's extension."""
        return request

    async def run_trial(
        self, engine: Engine, declared: Sequence[InferenceRequest], varied: Sequence[InferenceRequest], timeout_s: float
    ) -> None:
        """Tries the model. ``declared``: the sample and the examples. ``varied``: requests made from the sample.

        Raises GatewayError if the model cannot be called now.
        """
