"""Fits the declaration of a pipeline over an LLM backend to its model, before it is compiled."""

from pathlib import Path
from typing import Any, TypeVar

from app.core.model import ModelConfig
from app.llm.tokenizer import read_folder
from app.pipelines.mismatch import mismatch_at
from app.pipelines.openai_spec import ChatSpec
from app.pipelines.preset import Preset, preset_of, recognized
from app.pipelines.spec import InputSpec, LimitsSpec, OutputSpec, ParameterSpec, PipelineSpec, StreamSpec

Spec = TypeVar("Spec", InputSpec, OutputSpec, ParameterSpec)


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
    if tokenizers is None or spec.openai is None or spec.openai.chat is not None:
        return spec
    tokenizer = tokenizers / spec.model
    if not tokenizer.is_dir():
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
    if preset.accumulates(config):
        # A text that is joined piece by piece is then declared to repeat the text so far.
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
