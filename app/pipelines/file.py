"""Reads and checks ``gateway.yaml``."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.config.document import ConfigError, Lines, Location, complaint_at, read_regular_file, read_spec
from app.config.watch import FollowedFile, Stamp, stamp_of
from app.llm.tokenizer import EXTRA, MAX_TEMPLATE_BYTES, files_of, read_folder
from app.pipelines.openai_spec import ChatSpec
from app.pipelines.spec import GatewaySpec

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
    """With the text of every template, so that a changed template is a new version of its pipeline.

    Raises ConfigError.
    """
    spec, lines = read_spec(path, GatewaySpec)
    file = GatewayFile(path, spec, lines)
    folder, pipelines, stamps = path.parent, dict(spec.pipelines), dict[Path, Stamp]()
    for name, chat in _chats_of(spec).items():
        key = "template" if chat.template is not None else "tokenizer"
        try:
            if chat.template is not None:
                stamps[folder / chat.template] = stamp_of(folder / chat.template)
                text = read_regular_file(folder / chat.template, MAX_TEMPLATE_BYTES).decode("utf-8")
                read = chat.model_copy(update={"template_text": text})
            elif chat.tokenizer is not None:
                stamps |= {each: stamp_of(each) for each in files_of(folder / chat.tokenizer)}
                read = chat.with_folder(read_folder(folder / chat.tokenizer))
            else:
                continue
        except (OSError, ValueError) as exc:
            location = ("pipelines", name, "openai", "chat", key)
            raise ConfigError(file.complaint(location, f"cannot be read: {exc}")) from exc
        pipelines[name] = pipelines[name].with_chat(read)
    return replace(file, spec=spec.model_copy(update={"pipelines": pipelines}), templates=stamps)


def followed_gateway_file(path: Path) -> FollowedFile[GatewayFile]:
    """Follows the file and its templates."""
    return FollowedFile(path, read_gateway_file, "gateway.yaml", lambda file: file.templates)


def warn_without_counter(file: GatewayFile) -> None:
    """Logs once if a tokenizer folder could count tokens, but the package for it is not installed."""
    folders = (chat.folder for chat in _chats_of(file.spec).values() if chat.folder is not None)
    if any(folder.tokenizer_json is not None and folder.count_tokens is None for folder in folders):
        _log.warning("tokens cannot be counted with tokenizer.json: pip install '.[%s]'", EXTRA)


def _chats_of(spec: GatewaySpec) -> dict[str, ChatSpec]:
    declared = ((name, each.openai) for name, each in spec.pipelines.items())
    return {name: openai.chat for name, openai in declared if openai is not None and openai.chat is not None}
