"""Checks of LLM backends: what their preset needs, and what cannot work as they are configured.

docs/how-to/llm-backends.md describes the backends.
"""

from collections.abc import Iterable, Iterator, Sequence, Set

from app.core.model import ModelConfig, RepositoryModel
from app.lint.ensembles import Models, is_auto_completed
from app.lint.findings import Code, Finding
from app.pipelines.preset import preset_of, recognized
from app.pipelines.resolve import left_out, resolved, with_recognized_preset
from app.pipelines.spec import PipelineSpec

VLLM = "vllm"
HEALTH_CHECK = "ENABLE_VLLM_HEALTH_CHECK"

Declared = tuple[str | None, PipelineSpec]
"""The name in gateway.yaml, or None without a file, and the declaration."""
Fault = tuple[Code, str]


def unwatched_engines(repository: Iterable[RepositoryModel]) -> Iterator[Finding]:
    """Checks whether a vLLM model notices that its engine has died."""
    for model in repository:
        backend = model.config.backend if model.files is None else model.files.backend
        if backend == VLLM and model.config.parameter(HEALTH_CHECK).lower() != "true":
            text = f"a dead engine stays ready in Triton: set the parameter {HEALTH_CHECK} to true"
            yield Finding(Code.NO_HEALTH_CHECK, text, model.folder)


def preset_faults(pipelines: Iterable[Declared], models: Models, decoupled: Set[str]) -> Iterator[Finding]:
    """Checks the pipelines with a preset. ``decoupled``: the models that are, as decoupled_models finds them."""
    for name, given in pipelines:
        config = models[given.model]
        spec = with_recognized_preset(given, config)
        if spec.preset is None or is_auto_completed(config):
            continue
        faults = [*_mismatch(spec, config), *_stream_faults(spec, config, is_decoupled=spec.model in decoupled)]
        yield from (Finding(code, text, spec.model, pipeline=name) for code, text in faults)


def _mismatch(spec: PipelineSpec, config: ModelConfig) -> Iterator[Fault]:
    absent = left_out(spec, config)
    if not absent.tensors:
        return
    text = f"the preset {spec.preset} uses {_listed(absent.tensors)}, which the model does not have"
    text += f": the pipeline has no {', '.join(absent.fields)}" if absent.fields else ""
    other = recognized(config)
    text += f"; the model has the tensors of the preset {other}" if other not in (None, spec.preset) else ""
    yield Code.PRESET_MISMATCH, text


def _stream_faults(spec: PipelineSpec, config: ModelConfig, *, is_decoupled: bool) -> Iterator[Fault]:
    if spec.preset is None or spec.stream is None:
        return
    if not is_decoupled:
        where = "model.yaml" if spec.preset == "tensorrt_llm_api" else "config.pbtxt"
        text = f"the model is not decoupled, so a stream has one output: write `decoupled: true` in {where}"
        yield Code.NOT_DECOUPLED, text
        return
    parameter = preset_of(spec.preset).accumulates_if
    if parameter and not any(each.accumulates for each in (resolved(spec, config).outputs or {}).values()):
        remedy = "use tensorrt_llm_bls with" if config.is_ensemble else "set"
        text = f"each token becomes a text of its own, which splits characters: {remedy} {parameter}: true"
        yield Code.SPLIT_CHARACTERS, text


def _listed(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
