"""Explains why Triton, or a proxy in front of it, refuses the gateway's connection or token. Logs each cause once."""

import logging
import re

from app.triton.transport import RpcError

_OF_TLS = re.compile(r"\bssl\b|\btls|handshake|certificate|verification", re.IGNORECASE)
_CAUSES = (
    (r"has expired|certificate_expired", "the certificate of the server or of the gateway has expired"),
    (
        r"mismatch|hostname verification",
        "the certificate of the server does not match the name in GATEWAY_TRITON_URL",
    ),
    (r"certificate.?required|bad.?certificate|handshake.?failure", "set GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY"),
    (r"wrong.?version", "the server does not speak TLS at this port"),
    (r"unknown.?ca", "the server does not trust the certificate in GATEWAY_TRITON_CERT"),
    (r"verify.?failed", "no authority in GATEWAY_TRITON_CA signed the certificate of the server"),
)
"""Error texts of OpenSSL and grpcio, most specific first -> the cause or the remedy."""
_MAX_TEXT = 300

_log = logging.getLogger(__name__)


class Refusals:
    """The refusals of one Triton."""

    def __init__(self) -> None:
        self._logged = ""

    def note(self, error: RpcError) -> None:
        """Logs the error if it is a refusal with a new cause."""
        cause = cause_of(error)
        if cause and cause != self._logged:
            self._logged = cause
            _log.error("Triton refuses the gateway: %s", cause, extra={"error": error.details[:_MAX_TEXT]})

    def clear(self) -> None:
        """Call this when Triton answers, so that the next refusal is logged."""
        self._logged = ""


def cause_of(error: RpcError) -> str:
    """Returns the cause of a refusal; empty if the error is not a refusal."""
    if error.code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
        return "the token in GATEWAY_TRITON_TOKEN_FILE is missing, wrong or has expired"
    if error.code != "UNAVAILABLE" or not _OF_TLS.search(error.details):
        return ""
    known = (cause for pattern, cause in _CAUSES if re.search(pattern, error.details, re.IGNORECASE))
    return next(known, "the TLS connection failed")
