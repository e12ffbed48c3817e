"""Why Triton, or a proxy before it, refuses the connection or the token of the gateway; logged once."""

import logging
import re

from app.triton.transport import RpcError

_OF_TLS = re.compile(r"\bssl\b|\btls|handshake|certificate|verification", re.IGNORECASE)
_CAUSES = (
    (r"has expired|certificate_expired", "the certificate of the server or of the gateway has expired"),
    (
        r"mismatch|hostname verification",
        "the certificate of the server is not for the name in GATEWAY_TRITON_URL",
    ),
    (r"certificate.?required|bad.?certificate|handshake.?failure", "set GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY"),
    (r"wrong.?version", "the server does not speak TLS at this port"),
    (r"unknown.?ca", "the server does not trust the certificate in GATEWAY_TRITON_CERT"),
    (r"verify.?failed", "GATEWAY_TRITON_CA has no authority that vouches for the certificate of the server"),
)
"""What the texts of OpenSSL and of grpcio say, most specific first -> what it means, or what to do."""
_MAX_TEXT = 300

_log = logging.getLogger(__name__)


class Refusals:
    """Of one Triton."""

    def __init__(self) -> None:
        self._logged = ""

    def note(self, error: RpcError) -> None:
        """Logs the error if it is a refusal, and another one than before."""
        cause = cause_of(error)
        if cause and cause != self._logged:
            self._logged = cause
            _log.error("Triton refuses the gateway: %s", cause, extra={"error": error.details[:_MAX_TEXT]})

    def clear(self) -> None:
        """Triton answers: the next refusal is logged again."""
        self._logged = ""


def cause_of(error: RpcError) -> str:
    """Empty if the error is not a refusal."""
    if error.code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
        return "the token in GATEWAY_TRITON_TOKEN_FILE is missing, wrong or has expired"
    if error.code != "UNAVAILABLE" or not _OF_TLS.search(error.details):
        return ""
    known = (cause for pattern, cause in _CAUSES if re.search(pattern, error.details, re.IGNORECASE))
    return next(known, "the TLS connection failed")
