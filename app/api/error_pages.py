"""What the page of each error code says: the meaning, and what to do."""

from dataclasses import dataclass

from app.api.problems import STATUS_BY_ERROR
from app.domain import errors
from app.domain.errors import GatewayError, Outcome


@dataclass(frozen=True, slots=True)
class ErrorPage:
    status: int
    title: str
    outcome: Outcome
    retryable: bool
    meaning: str
    remedy: str


_TEXTS: dict[type[GatewayError], tuple[str, str]] = {
    errors.InvalidJson: ("The body could not be read as JSON.", "Check quoting and encoding; the body must be UTF-8."),
    errors.InvalidRequest: ("The request is malformed in a way that no field explains.", "The detail says what."),
    errors.UnknownPipeline: ("No pipeline has this name.", "GET /v1/pipelines lists them."),
    errors.NotFound: ("Nothing is served at this address.", "GET /docs shows every address."),
    errors.UnknownStream: ("No stream has this id, or it has expired.", "Start one with POST /v1/streams."),
    errors.StreamEvicted: (
        "The stream's buffer no longer holds the events that follow this Last-Event-ID.",
        "Start the stream anew; resume sooner, or ask for larger chunks.",
    ),
    errors.MethodNotAllowed: ("The address exists, for another method.", "The Allow header names the methods."),
    errors.SlowRequest: ("The headers or the body took too long to arrive.", "Send the request in one go."),
    errors.PayloadTooLarge: ("The body is over the gateway's limit.", "Raise GATEWAY_MAX_BODY_BYTES, or send less."),
    errors.UnsupportedMediaType: (
        "The content type is not one that the pipeline takes.",
        "Send application/json, multipart/form-data, or a file's own type where the pipeline takes one file.",
    ),
    errors.InvalidInput: (
        "A field is missing, unknown, of the wrong type or shape, or out of range.",
        "The errors list names each field; GET /v1/pipelines/{pipeline} shows what is expected.",
    ),
    errors.TooManyRequests: ("The queue of the model in Triton is full.", "Wait for Retry-After seconds, then retry."),
    errors.HeadersTooLarge: ("The request line and headers are too large.", "Send fewer or smaller headers."),
    errors.ClientClosedRequest: ("The client went away first.", "Seen in the log and in metrics only."),
    errors.SlowConsumer: ("The client did not read its stream.", "Read faster, or ask for larger chunks."),
    errors.Internal: ("A bug of the gateway.", "Report it with the request id and the log."),
    errors.ModelError: ("The model answered with an error.", "Triton's log and the gateway's log say more."),
    errors.ContractViolation: (
        "A tensor does not have the type, shape or size that was declared or agreed.",
        "The detail names the tensor, what was seen and what was agreed: correct the model that writes it.",
    ),
    errors.UpstreamProtocol: ("Triton's answer did not follow its protocol.", "Check Triton's version and its log."),
    errors.UpstreamUnavailable: ("Triton does not answer.", "See GET /health/ready; retry after Retry-After seconds."),
    errors.ModelNotReady: (
        "The pipeline's model is not loaded, or not warm yet.",
        "GET /health/ready shows its state.",
    ),
    errors.Draining: ("The gateway is shutting down.", "Retry: another replica will answer."),
    errors.DeadlineExceeded: (
        "The model did not answer within the deadline, or was silent for too long.",
        "Raise timeout_s or progress_s of the pipeline, or X-Request-Timeout up to that.",
    ),
}

ERROR_PAGES: dict[str, ErrorPage] = {
    error.code: ErrorPage(status, error.title, error.outcome, error.retryable, *_TEXTS[error])
    for error, status in STATUS_BY_ERROR.items()
}
