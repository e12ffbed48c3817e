"""The position of a request in a distributed trace.

Source: W3C Trace Context, https://www.w3.org/TR/trace-context-2/.
"""

import re
import secrets

from msgspec import Struct

SAMPLED = 0x01
_KNOWN_FLAGS = 0x03
"""The flags that the standard defines: sampled, and random trace id. A sender must not pass on other flags."""

_TRACEPARENT = re.compile(
    r"((?!ff)[0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?"
)
"""Version, trace id, span id, flags, and what later versions add."""
_KEY = r"(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MAX_MEMBERS = 32
_MAX_STATE = 512


class TraceContext(Struct, frozen=True):
    """``trace_id``: 32, ``span_id``: 16 lower-case hexadecimal digits; ``state``: a whole ``tracestate``, or empty."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> "TraceContext | None":
        """Returns None if ``traceparent`` is invalid. Ignores an invalid ``tracestate``."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        if version == "00" and rest is not None:
            return None
        members = [each for member in tracestate.split(",") if (each := member.strip(" \t"))]
        is_valid = len(tracestate) <= _MAX_STATE and len(members) <= _MAX_MEMBERS
        state = ",".join(members) if is_valid and all(map(_MEMBER.fullmatch, members)) else ""
        return cls(trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS, state)

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def sampled(trace: TraceContext | None) -> TraceContext:
    """A sampled context: the given one if it is sampled, otherwise another span of the same trace."""
    if trace is None:
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8), SAMPLED)
    if trace.is_sampled:
        return trace
    return TraceContext(trace.trace_id, secrets.token_hex(8), trace.flags | SAMPLED, trace.state)
