"""The one seam where Triton's and gRPC's errors become the gateway's own.

The texts are those of Triton 2.51; none is forwarded. In each table the most specific row comes first.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import DecodeError

from app.domain.errors import (
    ContractViolation,
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    TooManyRequests,
    UpstreamError,
    UpstreamProtocol,
    UpstreamUnavailable,
)


@contextmanager
def triton_errors(model: str = "") -> Iterator[None]:
    """Inside, whatever gRPC raises comes out as a GatewayError with ``upstream`` set."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        raise gateway_error_of(exc.code().name, exc.details() or "", model) from exc
    except (grpc.aio.UsageError, grpc.aio.InternalError, DecodeError) as exc:
        raise UpstreamProtocol("The exchange with Triton broke down.") from exc


def gateway_error_of(grpc_code: str | None, message: str, model: str) -> GatewayError:
    """The error of a failed call; ``grpc_code`` is None for an error inside a stream, which carries only text."""
    error = _error_by_text(grpc_code, message) or _ERROR_BY_CODE.get(grpc_code or "", _model_failed)(model)
    error.upstream = UpstreamError(grpc_code, message)
    return error


def _error_by_text(grpc_code: str | None, message: str) -> GatewayError | None:
    for codes, pattern, error_of in _ERROR_BY_TEXT:
        found = pattern.search(message)
        if found and (grpc_code is None or grpc_code in codes):
            return error_of(found)
    return None


def _queue_full(_found: re.Match[str]) -> GatewayError:
    return TooManyRequests("The model's queue in Triton is full.")


def _queue_timeout(_found: re.Match[str]) -> GatewayError:
    return UpstreamUnavailable("The request waited too long in the model's queue in Triton.")


def _not_loaded(_found: re.Match[str]) -> GatewayError:
    return ModelNotReady("Triton has no ready version of the model.")


def _process_died(_found: re.Match[str]) -> GatewayError:
    return ModelError(
        "The process of a model died, and Triton does not start it again.",
        hint="Unload and load the model in Triton, or restart Triton; its log says why the process ended.",
    )


def _unexpected_shape(found: re.Match[str]) -> GatewayError:
    tensor, model, expected, seen = found.group("tensor", "model", "expected", "seen")
    return ContractViolation(
        f"Input '{tensor}' of step '{model}' expects shape {expected} and was given {seen}.",
        tensor=tensor,
        hint=f"The step that feeds '{tensor}' wrote another shape than '{model}' declares.",
    )


def _not_written(found: re.Match[str]) -> GatewayError:
    tensor, model = found.group("tensor", "model")
    return ContractViolation(
        f"Step '{model}' was not given its input '{tensor}'.",
        tensor=tensor,
        hint=f"An earlier step answered without the tensor that feeds '{tensor}' of '{model}': "
        "let it always write that tensor, or declare the input optional.",
    )


def _text_too_long(_found: re.Match[str]) -> GatewayError:
    return ModelError(
        "The model failed with an error text too long for gRPC to carry.",
        hint="Keep the texts of a model's errors under 4 KiB.",
    )


def _model_failed(model: str) -> GatewayError:
    return ModelError(f"Model '{model}' failed.")


def _deadline_passed(model: str) -> GatewayError:
    return DeadlineExceeded(f"Model '{model}' did not answer before the deadline.")


def _unreachable(_model: str) -> GatewayError:
    return UpstreamUnavailable("Triton cannot be reached.")


_PREFIX = r"\A(?:in ensemble '[^']*', )*(?:\[request id: [^\]]*\] )?"

_ERROR_BY_TEXT: tuple[tuple[frozenset[str], re.Pattern[str], Callable[[re.Match[str]], GatewayError]], ...] = (
    (frozenset({"UNAVAILABLE"}), re.compile(_PREFIX + r"Exceeds maximum queue size\Z"), _queue_full),
    (frozenset({"UNAVAILABLE"}), re.compile(_PREFIX + r"Request timeout expired\Z"), _queue_timeout),
    (frozenset({"NOT_FOUND", "UNAVAILABLE"}), re.compile(_PREFIX + r"Request for unknown model: '"), _not_loaded),
    (frozenset({"INTERNAL"}), re.compile(_PREFIX + r"Stub process '[^']*' is not healthy\."), _process_died),
    (frozenset({"RESOURCE_EXHAUSTED"}), re.compile(r"metadata size exceeds"), _text_too_long),
    (
        frozenset({"INVALID_ARGUMENT"}),
        re.compile(
            _PREFIX + r"unexpected shape for input '(?P<tensor>[^']*)' for model '(?P<model>[^']*)'\. "
            r"Expected (?P<expected>\[[-\d,]*\]), got (?P<seen>\[[-\d,]*\])"
        ),
        _unexpected_shape,
    ),
    (
        frozenset({"INVALID_ARGUMENT"}),
        re.compile(
            _PREFIX + r"expected \d+ inputs but got \d+ inputs for model '(?P<model>[^']*)'\."
            r".*missing required input\(s\) \['(?P<tensor>[^']*)'"
        ),
        _not_written,
    ),
)

_ERROR_BY_CODE: dict[str, Callable[[str], GatewayError]] = {
    "DEADLINE_EXCEEDED": _deadline_passed,
    "UNAVAILABLE": _unreachable,
}
