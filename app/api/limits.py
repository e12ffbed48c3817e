"""The limits that the routes share."""

from dataclasses import dataclass, replace

from app.pipelines.pipeline import Target

OWN_KEY = "`limits.body_bytes` of the pipeline"


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    max_bytes_in_flight: int = 256 * 1024 * 1024
    """Limit for the bodies of all requests together."""
    max_connections: int = 4096
    body_s: float = 30.0
    """Time limit for the whole body to arrive."""
    ping_s: float = 15.0
    send_s: float = 10.0
    """Time limit for a client to make progress with reading."""
    body_key: str = "GATEWAY_MAX_BODY_BYTES"
    """What sets ``max_body_bytes``."""

    def of(self, pipeline: Target) -> "Limits":
        """The limits of requests to a pipeline, which may have its own limit of a body."""
        own = None if pipeline.spec.limits is None else pipeline.spec.limits.body_bytes
        if own is None:
            return self
        if own > self.max_bytes_in_flight:
            return replace(self, max_body_bytes=self.max_bytes_in_flight, body_key="GATEWAY_MAX_BYTES_IN_FLIGHT")
        return replace(self, max_body_bytes=own, body_key=OWN_KEY)
