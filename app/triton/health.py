"""Faults of Triton that Triton itself does not report."""

from dataclasses import dataclass, field

from app.domain.calls import CallObservers, ObservedCall
from app.domain.inference import InferenceRequest
from app.triton.progress import Progress
from app.triton.stubs import Stubs


@dataclass
class TritonHealth:
    """Observes calls; the engine answers ``is_live`` and ``model_ready`` in accordance with it."""

    stubs: Stubs = field(default_factory=Stubs)
    progress: Progress = field(default_factory=Progress)

    def started(self, request: InferenceRequest, method: str) -> ObservedCall:
        return CallObservers(self.stubs, self.progress).started(request, method)
