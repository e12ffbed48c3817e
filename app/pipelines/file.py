"""Reads and checks ``gateway.yaml``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.config.document import ConfigError, Lines, Location, complaint_at, read_regular_file, read_spec
from app.config.watch import FollowedFile, Stamp, stamp_of
from app.pipelines.spec import GatewaySpec, PipelineSpec

MAX_TEMPLATE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class GatewayFile:
    """A checked file: its content, the line of each key, and the base folder of its paths.

    ``templates``: the template files that it names, with their stamps before they were read.
    """

    path: Path
    spec: GatewaySpec
    lines: Lines
    templates: Mapping[Path, Stamp] = field(default_factory=dict)

    def complaint(self, location: Location, text: str) -> str:
        return complaint_at(self.path, self.lines, location, text)


def read_gateway_file(path: Path) -> GatewayFile:
    """Raises ConfigError."""
    spec, lines = read_spec(path, GatewaySpec)
    return _with_templates(GatewayFile(path, spec, lines))


def followed_gateway_file(path: Path, *, is_quiet: bool = False) -> FollowedFile[GatewayFile]:
    """Follows the file and its templates. ``is_quiet``: as of FollowedFile."""
    return FollowedFile(path, read_gateway_file, "gateway.yaml", is_quiet, lambda file: file.templates)


def _with_templates(file: GatewayFile) -> GatewayFile:
    """Returns the file with the text of every template. Raises ConfigError."""
    templates = {name: _template_of(file.path, pipeline) for name, pipeline in file.spec.pipelines.items()}
    stamps = {path: stamp_of(path) for path in templates.values() if path is not None}
    pipelines = {name: _with_template(file, name, each, templates[name]) for name, each in file.spec.pipelines.items()}
    return replace(file, spec=file.spec.model_copy(update={"pipelines": pipelines}), templates=stamps)


def _template_of(file: Path, pipeline: PipelineSpec) -> Path | None:
    """Returns the template file that the pipeline names, or None."""
    openai = pipeline.openai
    if openai is None or openai.chat is None or openai.chat.template is None:
        return None
    return file.parent / openai.chat.template


def _with_template(file: GatewayFile, name: str, pipeline: PipelineSpec, template: Path | None) -> PipelineSpec:
    """Adds the text to the pipeline's declaration, so that a changed text is a new version of the pipeline."""
    openai = pipeline.openai
    if template is None or openai is None or openai.chat is None:
        return pipeline
    try:
        text = read_regular_file(template, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as exc:
        location = ("pipelines", name, "openai", "chat", "template")
        raise ConfigError(file.complaint(location, f"cannot be read: {exc}")) from exc
    chat = openai.chat.model_copy(update={"template_text": text})
    return pipeline.model_copy(update={"openai": openai.model_copy(update={"chat": chat})})
