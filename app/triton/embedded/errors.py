"""What can go wrong with an embedded Triton.

EmbeddedTritonError
├── MachineUnfit
├── ModelEnvironmentUnfit
├── RepositoryUnservable
├── PortTaken
└── StartFailed
    └── StartTimedOut
"""


class EmbeddedTritonError(Exception):
    """The embedded server cannot run; the text is meant for the person at the terminal."""


class MachineUnfit(EmbeddedTritonError):
    """The operating system or its libraries are not what the wheel was built for."""


class ModelEnvironmentUnfit(EmbeddedTritonError):
    """The models' Python environment lacks something, or holds a numpy that corrupts tensors."""


class RepositoryUnservable(EmbeddedTritonError):
    """The model repository is missing, broken, or needs a backend that the wheel does not have."""


class PortTaken(EmbeddedTritonError):
    """Another process listens on a port that Triton was to use."""


class StartFailed(EmbeddedTritonError):
    """Triton ended before it was ready, most often because a model did not load."""


class StartTimedOut(StartFailed):
    """Triton was not ready in the time allowed."""
