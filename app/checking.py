"""``triton-gateway check``: the linter over a folder or a running Triton, and its findings in words."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.domain.engine import Engine
from app.domain.errors import GatewayError
from app.pipelines.file import GatewayFile, read_gateway_file
from app.pipelines.linter.check import check
from app.pipelines.linter.findings import Finding, Severity
from app.triton.engine import TritonEngine
from app.triton.model_repository import live_repository, read_repository
from app.triton.transports import open_transport

DEFAULT_REPOSITORY = Path("triton_models")

_log = logging.getLogger(__name__)


class CheckImpossible(Exception):
    """What was to be checked cannot be reached."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """``triton`` wins over ``repository``; ``config`` None: the pipelines are not checked."""

    repository: Path = DEFAULT_REPOSITORY
    config: Path | None = None
    triton: str | None = None
    strict: bool = False
    format: str = "text"


async def run_check(options: CheckOptions) -> tuple[list[Finding], int]:
    """The findings and the exit status: 0 clean, 1 errors, or with ``strict`` warnings too.

    Raises CheckImpossible, RepositoryUnreadable or ConfigError.
    """
    file = read_gateway_file(options.config) if options.config is not None else None
    if options.triton is None:
        findings = check(read_repository(options.repository), file)
    else:
        findings = await _check_live(options.triton, file)
    failing = {Severity.ERROR, Severity.WARNING} if options.strict else {Severity.ERROR}
    return findings, int(any(finding.severity in failing for finding in findings))


def report_of(findings: Sequence[Finding], style: str) -> str:
    """``text``: a line each; ``json``: one object."""
    if style == "json":
        return orjson.dumps({"findings": [_as_json(finding) for finding in findings]}).decode()
    lines = [_line(finding) for finding in findings]
    counts = [(severity, sum(finding.severity is severity for finding in findings)) for severity in Severity]
    return "\n".join([*lines, ", ".join(f"{count} {severity}" for severity, count in counts)])


async def log_findings(engine: Engine, file: GatewayFile | None) -> None:
    """What the linter finds in the models that are ready now, a log line each; never raises GatewayError."""
    try:
        findings = check(await live_repository(engine), file)
    except GatewayError as exc:
        _log.warning("the models could not be checked: %s", exc.detail)
        return
    for finding in findings:
        if finding.severity is not Severity.UNKNOWN:
            level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
            _log.log(level, "check: %s", finding.text, extra=_as_json(finding))


async def _check_live(url: str, file: GatewayFile | None) -> list[Finding]:
    async with open_transport(url) as transport:
        try:
            return check(await live_repository(TritonEngine(transport)), file)
        except GatewayError as exc:
            raise CheckImpossible(f"{url}: {exc.detail}") from exc


def _line(finding: Finding) -> str:
    where = f"{finding.model}: " if finding.model else ""
    return f"{finding.severity:7} {finding.code:18} {where}{finding.text}"


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "severity": finding.severity,
        "code": finding.code,
        "model": finding.model,
        "step": finding.step,
        "tensor": finding.tensor,
        "text": finding.text,
        "page": f"docs/checks/{finding.code}.md",
    }
