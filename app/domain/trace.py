"""Where a request stands in a distributed trace.

Source: W3C Trace Context, https://www.w3.org/TR/trace-context-2/.
"""

import re
from dataclasses import dataclass

SAMPLED = 0x01
_KNOWN_FLAGS = 0x03
"""Sampled, and random trace id: what the standard defines. A sender must not pass on flags that it does not know."""

_TRACEPARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-[\x21-\x7e]*)?"
)
_KEY = r"(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MAX_MEMBERS = 32
_MAX_STATE = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """``trace_id``: 32, ``span_id``: 16 lower-case hexadecimal digits; ``state``: a whole ``tracestate``, or empty."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> "TraceContext | None":
        """None where ``traceparent`` is not one to the letter; a ``tracestate`` that is none is left out."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None or (found["version"] == "00" and found["rest"] is not None):
            return None
        return cls(found["trace"], found["span"], int(found["flags"], 16) & _KNOWN_FLAGS, _state_of(tracestate))

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def _state_of(tracestate: str) -> str:
    members = [member.strip(" \t") for member in tracestate.split(",")]
    members = [member for member in members if member]
    is_one = len(tracestate) <= _MAX_STATE and len(members) <= _MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if is_one else ""
