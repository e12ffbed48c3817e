"""Faults of Triton that Triton itself does not report."""

from dataclasses import dataclass, field

from app.triton.progress import Progress
from app.triton.stubs import Stubs


@dataclass
class TritonHealth:
    """The engine reports its calls here, and answers ``is_live`` and ``model_ready`` in accordance with it."""

    stubs: Stubs = field(default_factory=Stubs)
    progress: Progress = field(default_factory=Progress)
