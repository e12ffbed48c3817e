"""The examples and the rules of W3C Trace Context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.inference import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXAMPLE = f"00-{TRACE}-{SPAN}-01"


def test_the_example_of_the_standard_is_parsed() -> None:
    trace = TraceContext.parse(EXAMPLE, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert trace == TraceContext(TRACE, SPAN, 1, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert trace.is_sampled
    assert trace.traceparent == EXAMPLE


def test_an_unsampled_trace_stays_unsampled() -> None:
    trace = TraceContext.parse(f"00-{TRACE}-{SPAN}-00")
    assert trace is not None
    assert not trace.is_sampled
    assert trace.traceparent.endswith("-00")


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "garbage",
        EXAMPLE + "\n",
        " " + EXAMPLE,
        EXAMPLE + "-",
        EXAMPLE + "-more",
        EXAMPLE.upper(),
        EXAMPLE.replace("-", ""),
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}-01-a\r\nX-Evil: 1",
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",
    ],
)
def test_an_invalid_traceparent_is_ignored(traceparent: str) -> None:
    assert TraceContext.parse(traceparent) is None


def test_a_future_traceparent_is_downgraded_to_version_00() -> None:
    trace = TraceContext.parse(f"cc-{TRACE}-{SPAN}-f9-what-the-future-will-be-like")
    assert trace is not None
    assert trace.traceparent == EXAMPLE


@pytest.mark.parametrize(
    ("tracestate", "kept"),
    [
        ("", ""),
        ("a=1 , b=2,\tc=3", "a=1,b=2,c=3"),
        ("tenant@system=x", "tenant@system=x"),
        ("a=1,,b=2", "a=1,b=2"),
        ("A=1", ""),
        ("a", ""),
        ("a=1\r\nx: y", ""),
        ("a=b=c", ""),
        ("a=\u00e4", ""),
        (",".join(f"k{number}=v" for number in range(33)), ""),
        ("a=" + "x" * 520, ""),
    ],
)
def test_an_invalid_tracestate_is_dropped_alone(tracestate: str, kept: str) -> None:
    trace = TraceContext.parse(EXAMPLE, tracestate)
    assert trace is not None
    assert trace.state == kept


@given(st.binary(min_size=1, max_size=1), st.binary(min_size=1, max_size=1), st.text(max_size=8), st.text(max_size=40))
def test_any_parsed_traceparent_is_valid_when_passed_on(version: bytes, flags: bytes, rest: str, state: str) -> None:
    trace = TraceContext.parse(f"{version.hex()}-{TRACE}-{SPAN}-{flags.hex()}{rest}", state)
    if trace is not None:
        assert TraceContext.parse(trace.traceparent, trace.state) == trace
        assert (trace.traceparent + trace.state).isprintable()
