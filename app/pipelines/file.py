"""Declarations as they are compiled: read from ``gateway.yaml`` with the files that it names, and fitted to models."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from app.config.document import ConfigError, FollowedFile, Lines, Location, complaint_at, read_spec
from app.config.mismatch import mismatch_at
from app.core.files import Stamp, read_regular_file, stamp_of
from app.core.model import ModelConfig
from app.llm.tokenizer import EXTRA, MAX_TEMPLATE_BYTES, files_of, read_folder
from app.pipelines.llm_spec import ChatSpec, Preset, preset_of, recognized
from app.pipelines.spec import (
    GatewaySpec,
    InputSpec,
    LimitsSpec,
    OutputSpec,
    ParameterSpec,
    PipelineSpec,
    StreamSpec,
)

Spec = TypeVar("Spec", InputSpec, OutputSpec, ParameterSpec)
_TRUE = frozenset({"true", "yes", "1", "t"})
"""The values that the script of ``tensorrt_llm_bls`` takes for true."""

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
            raise ConfigError(complaint_at(path, lines, location, f"cannot be read: {exc}")) from exc
        pipelines[name] = pipelines[name].with_chat(read)
    return GatewayFile(path, spec.model_copy(update={"pipelines": pipelines}), lines, stamps)


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


def derived_spec(model: str) -> PipelineSpec:
    """The declaration of a ready model's pipeline if there is no file."""
    return PipelineSpec(model=model, stream=StreamSpec())


def resolved(spec: PipelineSpec, config: ModelConfig, tokenizers: Path | None = None) -> PipelineSpec:
    """Returns the declaration without what the model of a preset does not have.

    A preset without ``chat`` gets it if the folder ``tokenizers`` has a tokenizer folder with the name of the model.
    Raises PipelineMismatch.
    """
    spec = with_recognized_preset(spec, config)
    if spec.preset is None:
        return spec
    spec = _fitted(spec, config, preset_of(spec.preset))
    tokenizer = None if tokenizers is None else tokenizers / spec.model
    if tokenizer is None or spec.openai is None or spec.openai.chat is not None or not tokenizer.is_dir():
        return spec
    with mismatch_at("openai", "chat", "tokenizer"):
        return spec.with_chat(ChatSpec(tokenizer=str(tokenizer)).with_folder(read_folder(tokenizer)))


def with_recognized_preset(spec: PipelineSpec, config: ModelConfig) -> PipelineSpec:
    """Adds the preset that recognizes the model to a pipeline that declares nothing."""
    name = recognized(config) if spec == derived_spec(spec.model) else None
    return spec if name is None else PipelineSpec.model_validate({"model": spec.model, "preset": name})


def left_out(spec: PipelineSpec, config: ModelConfig) -> tuple[list[str], list[str]]:
    """The tensors of its preset that a model does not have, and the fields that callers therefore do not have.

    Omits hidden parameters and optional inputs: many models of a backend have no adapters and no images.
    """
    if spec.preset is None:
        return [], []
    preset = preset_of(spec.preset)
    fitted = _fitted(spec, config, preset)
    absent: list[tuple[str, ParameterSpec | OutputSpec]] = [
        (name, each)
        for name, each in spec.parameters.items()
        if name not in fitted.parameters and not each.hidden and (config.decoupled or name not in preset.only_decoupled)
    ]
    absent += [(name, each) for name, each in (spec.outputs or {}).items() if name not in (fitted.outputs or {})]
    known = [name for name, each in absent if isinstance(each, OutputSpec) or each.send is None]
    return list(dict.fromkeys(str(_tensor_of(each)) for _, each in absent)), list(dict.fromkeys(known))


def _fitted(spec: PipelineSpec, config: ModelConfig, preset: Preset) -> PipelineSpec:
    given = {tensor.name for tensor in config.inputs}
    written = {tensor.name for tensor in config.outputs}
    parameters = _present(spec.parameters, given, preset, "parameters")
    if not config.decoupled:
        parameters = {name: each for name, each in parameters.items() if name not in preset.only_decoupled}
    outputs = _present(spec.outputs or {}, written, preset, "outputs")
    if config.parameter(preset.accumulates_if).lower() in _TRUE:
        # Each response repeats the text so far. A text that is joined piece by piece is then declared to do so.
        texts = {name for name, x in outputs.items() if x.kind == "text" and x.join in (None, "concatenate")}
        outputs |= {name: outputs[name].model_copy(update={"accumulates": True}) for name in texts}
    changed: dict[str, Any] = {
        "inputs": _present(spec.inputs or {}, given, preset, "inputs"),
        "parameters": parameters,
        "outputs": outputs,
    }
    limits, sizes = spec.limits or LimitsSpec(), [n for name, n in preset.body_bytes_by_input.items() if name in given]
    if sizes and limits.body_bytes is None:
        changed["limits"] = limits.model_copy(update={"body_bytes": max(sizes)})
    if spec.openai is not None:
        changed["openai"] = spec.openai.without(written, set(outputs), spec.parameters.keys() - parameters)
    return spec.model_copy(update=changed)


def _present(specs: dict[str, Spec], tensors: set[str], preset: Preset, key: str) -> dict[str, Spec]:
    """Omits what the preset declares and the model does not have, unless no request works without it."""
    optional = set(preset.pipeline[key])
    return {
        name: each
        for name, each in specs.items()
        if name not in optional
        or _tensor_of(each) in {None, *tensors}
        or (each.tensor in preset.outputs if isinstance(each, OutputSpec) else each.is_required)
    }


def _tensor_of(spec: InputSpec | OutputSpec | ParameterSpec) -> str | None:
    return spec.tensor or (spec.member_of if isinstance(spec, ParameterSpec) else None)
