"""Reads and checks ``gateway.yaml``."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.config.document import ConfigError, Lines, Location, complaint_at, read_regular_file, read_spec
from app.config.watch import FollowedFile, Stamp, stamp_of
from app.llm.tokenizer import EXTRA, MAX_TEMPLATE_BYTES, files_of, read_folder
from app.pipelines.openai_spec import ChatSpec
from app.pipelines.spec import GatewaySpec, PipelineSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayFile:
    """A checked file: its content, the line of each key, and the base folder of its paths.

    ``templates``: the template files and the files of tokenizer folders, with their stamps before they were read.
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


def followed_gateway_file(path: Path) -> FollowedFile[GatewayFile]:
    """Follows the file and its templates."""
    return FollowedFile(path, read_gateway_file, "gateway.yaml", lambda file: file.templates)


def warn_without_counter(file: GatewayFile) -> None:
    """Logs once if a tokenizer folder could count tokens, but the package for it is not installed."""
    specs = (pipeline.openai.chat for pipeline in file.spec.pipelines.values() if pipeline.openai is not None)
    folders = (chat.folder for chat in specs if chat is not None and chat.folder is not None)
    if any(folder.tokenizer_json is not None and folder.count_tokens is None for folder in folders):
        _log.warning("tokens cannot be counted with tokenizer.json: pip install '.[%s]'", EXTRA)


def _with_templates(file: GatewayFile) -> GatewayFile:
    """Returns the file with the text of every template. Raises ConfigError."""
    chats = {name: chat for name, each in file.spec.pipelines.items() if (chat := _chat_of(each)) is not None}
    stamps = {path: stamp_of(path) for chat in chats.values() for path in _paths_of(file.path.parent, chat)}
    read = {name: _with_template(file, name, chat) for name, chat in chats.items()}
    pipelines = {name: _with_chat(each, read.get(name)) for name, each in file.spec.pipelines.items()}
    return replace(file, spec=file.spec.model_copy(update={"pipelines": pipelines}), templates=stamps)


def _chat_of(pipeline: PipelineSpec) -> ChatSpec | None:
    return pipeline.openai.chat if pipeline.openai is not None else None


def _with_chat(pipeline: PipelineSpec, chat: ChatSpec | None) -> PipelineSpec:
    """Adds what was read to the declaration, so that a changed template is a new version of the pipeline."""
    if pipeline.openai is None or chat is None:
        return pipeline
    return pipeline.model_copy(update={"openai": pipeline.openai.model_copy(update={"chat": chat})})


def _paths_of(folder: Path, chat: ChatSpec) -> list[Path]:
    """The files that the declaration names."""
    if chat.template is not None:
        return [folder / chat.template]
    return list(files_of(folder / chat.tokenizer)) if chat.tokenizer is not None else []


def _with_template(file: GatewayFile, name: str, chat: ChatSpec) -> ChatSpec:
    """Raises ConfigError."""
    key = "template" if chat.template is not None else "tokenizer"
    try:
        return _read_template(file.path.parent, chat)
    except (OSError, ValueError) as exc:
        location = ("pipelines", name, "openai", "chat", key)
        raise ConfigError(file.complaint(location, f"cannot be read: {exc}")) from exc


def _read_template(folder: Path, chat: ChatSpec) -> ChatSpec:
    """Raises OSError or ValueError."""
    if chat.template is not None:
        text = read_regular_file(folder / chat.template, MAX_TEMPLATE_BYTES).decode("utf-8")
        return chat.model_copy(update={"template_text": text})
    return chat.with_folder(read_folder(folder / chat.tokenizer)) if chat.tokenizer is not None else chat
