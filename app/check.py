"""``triton-gateway check`` runs the linter and reports its findings; ``init --triton`` writes a first ``gateway.yaml``.

In a written file, a model that an ensemble runs as a step gets no pipeline of its own. What the configuration of a
model cannot tell is guessed from the names of its tensors, and marked with a comment. An LLM backend gets its preset.
Each pipeline is compiled before it is written.
"""

import asyncio
import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml
from msgspec.structs import replace

from app.codecs.kinds import holds_bytes
from app.config.mismatch import PipelineMismatch
from app.core.engine import InferenceServer
from app.core.errors import GatewayError, Unusable
from app.core.inference import BYTES
from app.core.model import Finding, ModelConfig, RepositoryModel, TensorSpec
from app.core.text import printable
from app.lint.findings import Severity, check_of, page_of
from app.lint.known_faults import FaultsMet, version_of
from app.lint.linter import check
from app.pipelines.catalog import Catalog
from app.pipelines.file import GatewayFile, read_gateway_file
from app.pipelines.llm_spec import recognized
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.spec import RESERVED_NAMES, PipelineSpec
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
    accepted: Sequence[str] = ()
    """The codes of the findings that the file accepts."""
    known_faults: str = ""
    """Those of this version of Triton that the models can meet; empty if the version is not known."""

    @property
    def pipelines(self) -> int | None:
        return None if self.file is None else len(self.file.spec.pipelines)

    def status(self, *, strict: bool) -> int:
        """Returns the exit status: 1 for errors, with ``strict`` also for warnings, otherwise 0."""
        failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return int(any(check_of(finding).severity in failing for finding in self.findings))

    @property
    def summary(self) -> str:
        """For example ``19 models, 9 pipelines: no findings``."""
        counts = Counter(check_of(each).severity for each in self.findings)
        counted = ((counts[each], each) for each in Severity if counts[each])
        found = ", ".join(f"{n} {each}{'s' * (n > 1 and each != 'unknown')}" for n, each in counted)
        pipelines = f"{self.pipelines} pipeline{'s' * (self.pipelines != 1)}"
        pipelines = "no gateway.yaml" if self.pipelines is None else pipelines
        accepted = f"; accepted: {', '.join(self.accepted)}" if self.accepted else ""
        known = f"\n{self.known_faults}" if self.known_faults else ""
        return f"{self.models} model{'s' * (self.models != 1)}, {pipelines}: {found or 'no findings'}{accepted}{known}"


async def run_check(
    repository: Path,
    config: Path | None,
    triton: str | None = None,
    credentials: Credentials = NO_CREDENTIALS,
    triton_version: str = "",
) -> CheckReport:
    """``triton`` overrides ``repository`` and ``triton_version``. Without ``config``, pipelines are not checked.

    Raises RepositoryUnservable, ConfigError or GatewayError.
    """
    file = read_gateway_file(config) if config is not None else None
    if triton is None:
        return _report(read_repository(repository), file, triton_version)
    async with open_engine(triton, credentials) as engine:
        return await _live_report(engine, file)


def text_of(report: CheckReport, style: str) -> str:
    """Formats a report. ``text`` has a summary, the findings and what to do about each code; ``json`` is one object."""
    findings = [_as_json(finding) for finding in report.findings]
    if style == "json":
        found = {"models": report.models, "pipelines": report.pipelines, "findings": findings}
        return orjson.dumps(found | {"accepted": report.accepted, "known_faults": report.known_faults}).decode()
    lines = [
        f"{each['severity']:7} {each['code']:18} " + ": ".join(filter(None, (each["model"], each["text"])))
        for each in findings
    ]
    solutions = {finding.code: f"{finding.code}: {check_of(finding).solution}" for finding in report.findings}
    return "\n".join([report.summary, *lines, *([""] if solutions else []), *solutions.values()])


async def _live_report(engine: InferenceServer, file: GatewayFile | None) -> CheckReport:
    """Raises GatewayError."""
    repository = await live_repository(engine)
    server = await engine.document("server", "")
    report = await asyncio.to_thread(_report, repository, file, server.get("version", ""))  # reads sample files
    findings = [*report.findings]
    for name in (model.config.name for model in repository):
        for address, reason in engine.absences(name).items():
            if reason == "other_signature":
                text = f"has other inputs or outputs at {address} than on most Tritons, so it is not used there"
                findings.append(Finding("other-signature", text, name))
    return CheckReport(len(repository), file, findings, report.accepted, report.known_faults)


def _report(repository: Sequence[RepositoryModel], file: GatewayFile | None, triton_version: str) -> CheckReport:
    found, version = check(repository, file), version_of(triton_version)
    met = FaultsMet(repository, version) if version else None
    found += met.findings() if met is not None else ()
    named = () if file is None else file.spec.accept
    acceptable = (each for each in found if each.code in named and check_of(each).severity is not Severity.ERROR)
    accepted = [*dict.fromkeys(each.code for each in acceptable)]
    findings = [each for each in found if each.code not in accepted]
    return CheckReport(len(repository), file, findings, accepted, met.summary if met is not None else "")


async def live_findings(catalog: Catalog) -> Sequence[Finding]:
    """The findings in the ready models and in gateway.yaml, and the faults of layers. Raises GatewayError."""
    findings = [*(await _live_report(catalog.engine, catalog.file)).findings]
    for name, entry in catalog.entries.items():
        for layer in () if entry.pipeline is None else entry.pipeline.layers:
            if layer.fault is not None:
                findings.append(replace(layer.fault, model=entry.spec.model, pipeline=name))
    return findings


async def log_findings(engine: InferenceServer, file: GatewayFile | None) -> None:
    """Checks the ready models and logs the findings. Never raises GatewayError."""
    try:
        report = await _live_report(engine, file)
    except GatewayError as exc:
        _log.warning("the models could not be checked: %s", exc.detail)
        return
    for line in report.summary.splitlines():
        _log.info("check: %s", line)
    for finding in report.findings:
        if (severity := check_of(finding).severity) is not Severity.UNKNOWN:
            _log.log(_LEVELS[severity], "check: %s", finding.text, extra=_as_json(finding))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "severity": check_of(finding).severity,
        "code": finding.code,
        "model": None if finding.model is None else printable(finding.model, MAX_TEXT),
        "step": finding.step,
        "tensor": None if finding.tensor is None else printable(finding.tensor, MAX_TEXT),
        "text": printable(finding.text, MAX_TEXT),
        "page": f"/docs/reference/{page_of(finding)}.html#{finding.code}",
    }


_KINDS = (
    ("image", re.compile(r"image|img|photo|picture|frame", re.IGNORECASE)),
    ("binary", re.compile(r"audio|wav|bytes|file|blob|video|pdf|encoded", re.IGNORECASE)),
    ("json", re.compile(r"json", re.IGNORECASE)),
)
_FILE = re.compile(r"encoded|jpe?g|png|bytes|blob|pdf|wav|mp[34]", re.IGNORECASE)
"""Names of tensors of 8-bit numbers that are files. ``image`` is not one of them: it may be an ``image_mask``."""
_GUESSED = "  # a guess"
_HEAD = """\
# Pipelines over the models that Triton has ready at {url}.
# A pipeline is one model or ensemble under a name of its own. Rename fields, and delete what callers should not use.
# A tensor of bytes (BYTES) is of kind text, image, binary or json. Only its name tells which, so check each guess.
# Numbers of 8 bits with the dims [-1] may be a file or a text too: kind image, binary or text.
# Check the file: triton-gateway check --triton {url} --config {path}
# Every key: /docs/reference/gateway-yaml.html of the gateway
"""


async def draft(url: str, credentials: Credentials, path: Path) -> str:
    """Writes a gateway.yaml for the models of a running Triton, and returns what to do next."""
    async with open_engine(url, credentials) as engine:
        models = {model.config.name: model.config for model in await live_repository(engine)}
    return write_draft(models, url, path)


def write_draft(configs: Mapping[str, ModelConfig], url: str, path: Path) -> str:
    """Writes the file for the ready models and returns what to do next. Raises Unusable."""
    if path.exists():
        raise Unusable(f"{path} already exists: name another file, nothing was written.")
    steps = {step.model for config in configs.values() for step in config.steps}
    # The most readable first: ensembles, then models whose first input is a text.
    order = sorted(
        (not each.steps, [spec.datatype for spec in each.inputs[:1]] != [BYTES], each.name)
        for each in configs.values()
        if each.name not in steps
    )
    text, count = _HEAD.format(url=url, path=path) + "pipelines:\n", 0
    for *_, name in order:
        config, preset = configs[name], recognized(configs[name])
        keys: dict[str, Any] = {"model": name, "preset": preset}
        if preset is None:
            keys = {"model": name, "inputs": _fields_of(config.inputs), "outputs": _fields_of(config.outputs)}
            keys |= {"stream": True} if config.decoupled else {}
            keys |= PipelineSpec.model_validate(keys).missing_keys(config, configs)
        problem = _problem_of(config, keys, configs)
        count += problem is None
        text += "".join(_lines_of(config, keys, problem))
    if not count:
        raise Unusable(f"Triton at {url} has no ready model that a pipeline can call: nothing was written.")
    if steps:
        text += f"# Steps of ensembles, without a pipeline of their own: {', '.join(sorted(steps))}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as exc:
        raise Unusable(f"{path} cannot be written: {exc.strerror or exc}.") from exc
    options = f"--triton {url} --config {shlex.quote(str(path))}"
    return (
        f"{path} has {count} pipeline{'s' * (count > 1)}. Read it, then:\n"
        f"  triton-gateway check {options}\n  triton-gateway serve {options}"
    )


def _fields_of(tensors: Iterable[TensorSpec]) -> dict[str, dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        name = re.sub(r"[^a-z0-9._-]", "_", tensor.name.lower()) or "value"
        while name in fields or name in RESERVED_NAMES or not re.match(r"[a-z0-9_]", name):
            name = f"_{name}"
        fields[name] = {"tensor": tensor.name}
        if tensor.datatype == BYTES:
            fields[name]["kind"] = next((kind for kind, names in _KINDS if names.search(tensor.name)), "text")
        elif holds_bytes(tensor) and _FILE.search(tensor.name):
            fields[name]["kind"] = "binary"
        if tensor.optional:
            fields[name]["optional"] = True
    return fields


def _problem_of(config: ModelConfig, keys: Mapping[str, Any], models: Mapping[str, ModelConfig]) -> str | None:
    """Why the gateway cannot serve such a pipeline, on one line; None if it can."""
    try:
        Pipeline(config.name, PipelineSpec.model_validate(keys), config, models, CompileContext())
    except PipelineMismatch as exc:
        return " ".join(f"{'.'.join(map(str, exc.location))} {exc.text}".split())
    except ValueError as exc:
        return " ".join(str(exc).splitlines()[-1].split())
    return None


def _lines_of(config: ModelConfig, keys: Mapping[str, Any], problem: str | None) -> Iterator[str]:
    """The lines of one pipeline; as comments if it cannot be served."""
    mark = "  " if problem is None else "  # "
    what = f"an ensemble of {len(config.steps)} steps" if config.steps else config.backend or "a model"
    yield f"  # {config.name}: {what}{', decoupled: any number of responses' if config.decoupled else ''}\n"
    if problem is not None:
        yield f"  # The gateway cannot serve it like this: {problem}\n"
    yield f"{mark}{_scalar(config.name)}:\n"
    yield f"{mark}  model: {_scalar(config.name)}\n"
    if "preset" in keys:
        yield f"{mark}  preset: {keys['preset']}  # by its tensors; for chats openai: {{chat: {{tokenizer: DIR}}}}\n"
    for section in ("inputs", "outputs"):
        if keys.get(section):
            yield f"{mark}  {section}:\n"
        for name, field in keys.get(section, {}).items():
            values = ", ".join(f"{key}: {_scalar(value)}" for key, value in field.items())
            yield f"{mark}    {_scalar(name)}: {{{values}}}{_GUESSED if 'kind' in field else ''}\n"
    yield from (f"{mark}  {key}: true\n" for key, value in keys.items() if value is True)


def _scalar(value: Any) -> str:
    """The YAML of a name, a number or a truth value, in quotes where YAML needs them."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).partition("\n")[0]
