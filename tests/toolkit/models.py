"""Builds configurations, responses and compiled pipelines from short arguments."""

from typing import Any

import numpy as np

from app.core.errors import GatewayError, ModelError, UpstreamError
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, InferenceResponse, Tensor, bytes_array
from app.core.model import ModelConfig, Step, TensorSpec
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.spec import PipelineSpec

KEY = b"a key of sixteen bytes or more"


def tensor_spec(text: str) -> TensorSpec:
    """Parses ``"X FP32 [-1,4]"`` or ``"X FP32 [1] optional"``."""
    name, datatype, dims, *rest = text.split(" ")
    return TensorSpec(name, datatype, tuple(int(dim) for dim in dims.strip("[]").split(",") if dim), bool(rest))


def model(
    inputs: str | list[str] = (), outputs: str | list[str] = (), *, name: str = "model", **more: Any
) -> ModelConfig:
    given, written = ([text] if isinstance(text, str) else text for text in (inputs, outputs))
    return ModelConfig(
        name=name,
        backend=more.pop("backend", "python"),
        max_batch_size=more.pop("max_batch_size", 0),
        inputs=tuple(map(tensor_spec, given)),
        outputs=tuple(map(tensor_spec, written)),
        **more,
    )


def ensemble(name: str, config: ModelConfig) -> ModelConfig:
    """Returns an ensemble with one step and the same tensors."""
    step = Step(
        config.name,
        "",
        tuple((spec.name, spec.name) for spec in config.inputs),
        tuple((spec.name, spec.name) for spec in config.outputs),
    )
    return ModelConfig(name, "ensemble", config.max_batch_size, config.inputs, config.outputs, steps=(step,))


def pipeline(config: ModelConfig, *below: ModelConfig, key: bytes | None = KEY, **spec: Any) -> Pipeline:
    """Compiles a pipeline; ``spec`` has the keys of gateway.yaml without ``model``."""
    return pipeline_of(config, PipelineSpec.model_validate({"model": config.name, **spec}), *below, key=key)


def pipeline_of(config: ModelConfig, spec: PipelineSpec, *below: ModelConfig, key: bytes | None = KEY) -> Pipeline:
    models = {each.name: each for each in (config, *below)}
    return Pipeline("p", spec, config, models, CompileContext(early_exit_key=key))


def tensor(name: str, datatype: str, values: Any) -> Tensor:
    if datatype != BYTES:
        return Tensor(name, datatype, np.array(values, dtype=DTYPE_BY_DATATYPE[datatype]))
    return Tensor(name, datatype, bytes_array(values, (len(values),)))


def response(*tensors: Tensor, is_final: bool = True) -> InferenceResponse:
    return InferenceResponse({each.name: each for each in tensors}, is_final)


def refusal(message: str, grpc_code: str | None = "ALREADY_EXISTS") -> GatewayError:
    """Returns an error of a model as app/triton converts it."""
    error = ModelError("Model 'model' failed.")
    error.upstream = UpstreamError(grpc_code, message)
    return error
