"""``triton-gateway check``: runs the linter on a folder or a running Triton, and reports the findings."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.core.engine import InferenceServer
from app.core.errors import GatewayError
from app.core.text import printable
from app.lint.findings import Finding, Severity
from app.lint.linter import check
from app.pipelines.catalog import Catalog
from app.pipelines.file import GatewayFile, read_gateway_file
from app.triton.credentials import NO_CREDENTIALS, Credentials
from app.triton.fleet.pool import open_engine
from app.triton.repository import live_repository, read_repository

MAX_TEXT = 1000
"""Limit of characters for each text of a finding, because names in a repository can have any length."""

_LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.HINT: logging.INFO}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The number of models, the gateway.yaml that was checked too, and the findings."""

    models: int
    file: GatewayFile | None
    findings: Sequence[Finding]

    @property
    def pipelines(self) -> int | None:
        return None if self.file is None else len(self.file.spec.pipelines)

    def status(self, *, strict: bool) -> int:
        """Returns the exit status: 1 for errors, with ``strict`` also for warnings, otherwise 0."""
        failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return int(any(finding.severity in failing for finding in self.findings))

    @property
    def summary(self) -> str:
        """For example ``19 models, 9 pipelines: no findings``."""
        counts = [(severity, sum(each.severity is severity for each in self.findings)) for severity in Severity]
        found = ", ".join(f"{n} {each}{'s' * (n > 1 and each != 'unknown')}" for each, n in counts if n)
        pipelines = f"{self.pipelines} pipeline{'s' * (self.pipelines != 1)}"
        pipelines = "no gateway.yaml" if self.pipelines is None else pipelines
        return f"{self.models} model{'s' * (self.models != 1)}, {pipelines}: {found or 'no findings'}"


async def run_check(
    repository: Path, config: Path | None, triton: str | None = None, credentials: Credentials = NO_CREDENTIALS
) -> CheckReport:
    """``triton`` overrides ``repository``. Without ``config``, pipelines are not checked.

    Raises RepositoryUnreadable, ConfigError or GatewayError.
    """
    file = read_gateway_file(config) if config is not None else None
    if triton is None:
        models = read_repository(repository)
        return CheckReport(len(models), file, check(models, file))
    async with open_engine(triton, credentials) as engine:
        return await _live_report(engine, file)


def text_of(report: CheckReport, style: str) -> str:
    """Formats a report. ``text`` has the summary and a line for each finding; ``json`` is one object."""
    findings = [_as_json(finding) for finding in report.findings]
    if style == "json":
        return orjson.dumps({"models": report.models, "pipelines": report.pipelines, "findings": findings}).decode()
    lines = [
        f"{each['severity']:7} {each['code']:18} " + ": ".join(filter(None, (each["model"], each["text"])))
        for each in findings
    ]
    return "\n".join([report.summary, *lines])


async def _live_report(engine: InferenceServer, file: GatewayFile | None) -> CheckReport:
    """Raises GatewayError."""
    repository = await live_repository(engine)
    findings = await asyncio.to_thread(check, repository, file)  # reads sample files
    for name in (model.config.name for model in repository):
        for address, reason in engine.absences(name).items():
            if reason == "other_signature":
                text = f"has other inputs or outputs at {address} than on most Tritons, so it is not used there"
                findings.append(Finding("other-signature", text, name))
    return CheckReport(len(repository), file, findings)


async def live_findings(catalog: Catalog) -> Sequence[Finding]:
    """The findings in the ready models and in gateway.yaml, and the faults of layers. Raises GatewayError."""
    findings = [*(await _live_report(catalog.engine, catalog.file)).findings]
    for name, entry in catalog.entries.items():
        for layer in () if entry.pipeline is None else entry.pipeline.layers:
            if (fault := layer.fault) is not None:
                output = fault.output or None
                findings.append(Finding(fault.code, fault.text, entry.spec.model, tensor=output, pipeline=name))
    return findings


async def log_findings(engine: InferenceServer, file: GatewayFile | None) -> None:
    """Checks the ready models and logs the findings. Never raises GatewayError."""
    try:
        report = await _live_report(engine, file)
    except GatewayError as exc:
        _log.warning("the models could not be checked: %s", exc.detail)
        return
    _log.info("check: %s", report.summary)
    for finding in report.findings:
        if finding.severity is not Severity.UNKNOWN:
            _log.log(_LEVELS[finding.severity], "check: %s", finding.text, extra=_as_json(finding))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "code": finding.code,
        "model": None if finding.model is None else printable(finding.model, MAX_TEXT),
        "step": finding.step,
        "tensor": None if finding.tensor is None else printable(finding.tensor, MAX_TEXT),
        "text": printable(finding.text, MAX_TEXT),
        "page": f"docs/reference/checks.md#{finding.code}",
    }
