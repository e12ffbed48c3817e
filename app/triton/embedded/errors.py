"""Errors of the embedded Triton.

EmbeddedTritonError
├── MachineUnfit
├── ModelEnvironmentUnfit
├── RepositoryUnservable
├── PortTaken
└── StartFailed
    ├── StartCrashed
    └── StartTimedOut
"""


class EmbeddedTritonError(Exception):
    """The embedded Triton cannot run. The message is for the user at the terminal."""


class MachineUnfit(EmbeddedTritonError):
    """The wheel does not support the operating system or its libraries."""


class ModelEnvironmentUnfit(EmbeddedTritonError):
    """The models' Python environment is incomplete, or its numpy version corrupts tensors."""


class RepositoryUnservable(EmbeddedTritonError):
    """The model repository is missing, broken, or needs a backend that the wheel does not have."""


class PortTaken(EmbeddedTritonError):
    """Another process uses a port that is configured for Triton."""


class StartFailed(EmbeddedTritonError):
    """Triton exited before it was ready, usually because a model failed to load."""


class StartCrashed(StartFailed):
    """A signal ended Triton before it was ready, and no model had failed to load."""


class StartTimedOut(StartFailed):
    """Triton was not ready before the timeout."""
