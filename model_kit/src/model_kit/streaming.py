"""The decoupled counterpart of ``serving``: many responses for a request, and always exactly one FINAL.

FINAL travels in the same ``send`` as the last response or the error: an error with a separate FINAL after it crashes
tritonserver 2.51 when the caller asked for gRPC errors in its stream.

FINAL after a cancellation comes late, see ``SETTLE_S``.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from model_kit.serving import Outputs, error_of, tensors_of
from model_kit.tensor_log import notes_on

SETTLE_S = 0.05
"""The delay of the FINAL of a cancelled request.

Triton 2.51 ends a cancelled stream when its FINAL comes, even while it still writes an earlier response; when that
write is done it uses the stream's memory again, which by then is another's, and may abort. Each write is done long
before this has passed. See docs/decisions/0008-cancellation.md.
"""

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(frozen=True)
class Part:
    """One response of a stream."""

    outputs: Outputs
    is_last: bool = False


def stream_each(
    requests: Sequence[Any],
    accept: Callable[[Any, Callable[[], bool]], Iterable[Part] | None],
    submit: Callable[[Callable[[], None]], None],
) -> None:
    """Start every request of a decoupled ``execute`` on its own; a refused one is answered at once.

    Args:
        requests: what Triton hands to ``execute``.
        accept: one request, and a function that says whether its caller has gone -> its parts, made while they are
            read, or None where there is nothing to answer; reads the tensors before it returns; may raise EarlyExit
            or InvalidInput.
        submit: runs what it is given later, on a thread of its own.
    """
    for request in requests:
        sender = request.get_response_sender()
        try:
            parts = accept(request, sender.is_cancelled)
        except Exception as exc:
            _send_error(sender, exc)
            continue
        if parts is None:
            relay(sender, ())
        else:
            submit(partial(relay, sender, parts, notes_on(request)))


def relay(sender: Any, parts: Iterable[Part], note: Callable[[Outputs], None] = lambda outputs: None) -> None:
    """Sends the parts as they arrive; never raises. Sends a FINAL without a response if there is no last part.

    Args:
        note: told of the tensors of each response.
    """
    try:
        for part in parts:
            note(part.outputs)
            response = pb_utils.InferenceResponse(tensors_of(part.outputs))
            if part.is_last:
                send_final(sender, response)
                return
            sender.send(response)
        send_final(sender)
    except Exception as exc:
        _send_error(sender, exc)


def send_final(sender: Any, response: Any = None) -> None:
    """Sends FINAL, with the last response or error if there is one; delayed by ``SETTLE_S`` after a cancellation."""
    if sender.is_cancelled():
        time.sleep(SETTLE_S)
    sender.send(response, flags=_FINAL)


def _send_error(sender: Any, exc: Exception) -> None:
    try:
        send_final(sender, pb_utils.InferenceResponse(error=error_of(exc)))
    except Exception as unsent:
        pb_utils.Logger.log_error(f"a stream could not be ended: {type(unsent).__name__}")
