"""Reads and checks ``gateway.yaml``."""

from dataclasses import dataclass, replace
from pathlib import Path

from app.files.complaints import ConfigError, Location, complaint_at, read_spec
from app.files.document import Lines, read_regular_file
from app.pipelines.spec import GatewaySpec, PipelineSpec

MAX_TEMPLATE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class GatewayFile:
    """A checked file: its content, the line of each key, and the base folder of its paths."""

    path: Path
    spec: GatewaySpec
    lines: Lines

    def complaint(self, location: Location, text: str) -> str:
        return complaint_at(self.path, self.lines, location, text)


def read_gateway_file(path: Path) -> GatewayFile:
    """Raises ConfigError."""
    spec, lines = read_spec(path, GatewaySpec)
    return _with_templates(GatewayFile(path, spec, lines))


def _with_templates(file: GatewayFile) -> GatewayFile:
    """Returns the file with the text of every template. Raises ConfigError."""
    pipelines = {name: _with_template(file, name, pipeline) for name, pipeline in file.spec.pipelines.items()}
    return replace(file, spec=file.spec.model_copy(update={"pipelines": pipelines}))


def _with_template(file: GatewayFile, name: str, pipeline: PipelineSpec) -> PipelineSpec:
    """Adds the text to the pipeline's declaration, so that a changed text is a new version of the pipeline."""
    openai = pipeline.openai
    if openai is None or openai.chat is None or openai.chat.template is None:
        return pipeline
    try:
        text = read_regular_file(file.path.parent / openai.chat.template, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as exc:
        location = ("pipelines", name, "openai", "chat", "template")
        raise ConfigError(file.complaint(location, f"cannot be read: {exc}")) from exc
    chat = openai.chat.model_copy(update={"template_text": text})
    return pipeline.model_copy(update={"openai": openai.model_copy(update={"chat": chat})})
