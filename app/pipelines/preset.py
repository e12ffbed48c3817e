"""The presets of LLM backends, and which of them recognizes a model."""

import functools
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal, get_args

import msgspec
import yaml
from msgspec import Struct

from app.core.model import ModelConfig

PresetName = Literal["vllm", "tensorrt_llm", "tensorrt_llm_api", "vllm_embeddings"]
NAMES: tuple[PresetName, ...] = get_args(PresetName)
_TRUE = frozenset({"true", "yes", "1", "t"})
"""The values that the script of ``tensorrt_llm_bls`` takes for true."""


class Preset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of ``app/pipelines/presets``. ``pipeline`` is in the words of ``gateway.yaml``."""

    inputs: frozenset[str]
    outputs: frozenset[str]
    """The tensors by which a model is recognized."""
    only_decoupled: frozenset[str] = frozenset()
    """The parameters that a model without streams must not get."""
    automatic: bool = True
    """Whether a model without a declaration can get the preset."""
    accumulates_if: str = ""
    """The parameter of the model's configuration that says whether each response repeats the text so far."""
    body_bytes_by_input: dict[str, int] = {}
    """Input tensor -> the limit of a body for a model that has it."""
    pipeline: dict[str, Any]

    def recognizes(self, config: ModelConfig) -> bool:
        inputs, outputs = (frozenset(tensor.name for tensor in each) for each in (config.inputs, config.outputs))
        return self.automatic and self.inputs <= inputs and self.outputs <= outputs

    def accumulates(self, config: ModelConfig) -> bool:
        """Whether each response of the model repeats the text so far."""
        return config.parameter(self.accumulates_if).lower() in _TRUE


@functools.cache
def preset_of(name: PresetName) -> Preset:
    text = files("app.pipelines").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    return msgspec.convert(yaml.safe_load(text), Preset)


def recognized(config: ModelConfig) -> PresetName | None:
    """The preset whose tensors the model has."""
    return next((name for name in NAMES if preset_of(name).recognizes(config)), None)


def with_preset(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of a pipeline with those of its preset. A given key overrides the preset's, at every depth."""
    name = given.get("preset")
    return merged(preset_of(name).pipeline, given) if name in NAMES else given


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in given.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
