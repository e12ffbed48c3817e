"""Opens the tracer of the settings. Imports the OpenTelemetry SDK only if a collector is set."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.observability.tracing import NoTracer, Tracer


class TracingUnavailable(Exception):
    """Tracing is on, but the packages for sending spans are not installed."""


@asynccontextmanager
async def open_tracer(url: str | None, version: str) -> AsyncIterator[Tracer]:
    """``url``: the collector's address for traces; None: no spans. Raises TracingUnavailable."""
    tracer = NoTracer() if url is None else _otlp_tracer(url, version)
    try:
        yield tracer
    finally:
        await tracer.close()


def _otlp_tracer(url: str, version: str) -> Tracer:
    try:
        from app.observability.otlp import OtlpTracer  # noqa: PLC0415 - costs memory, and is an extra
    except ModuleNotFoundError as exc:
        raise TracingUnavailable("GATEWAY_OTLP_ENDPOINT needs the extra `otel`: pip install '.[otel]'") from exc
    return OtlpTracer(url, version)
