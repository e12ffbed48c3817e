"""The common parts of operations that run inference: errors, and the header for the deadline."""

from app.domain import errors
from app.domain.json_schema import Schema

INFERENCE_ERRORS = (
    errors.InvalidJson,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
    errors.InvalidInput,
    errors.TooManyRequests,
    errors.ModelError,
    errors.ContractViolation,
    errors.UpstreamProtocol,
    errors.UpstreamUnavailable,
    errors.ModelNotReady,
    errors.Draining,
    errors.DeadlineExceeded,
)
IDEMPOTENCY_HEADER: Schema = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
    "description": "A unique key, such as a UUID: a repeated request with the same body gets the first answer again.",
}
TIMEOUT_HEADER: Schema = {
    "name": "X-Request-Timeout",
    "in": "header",
    "schema": {"type": "number", "exclusiveMinimum": 0},
    "description": "Seconds until the deadline. The pipeline's own deadline is the upper limit.",
}
