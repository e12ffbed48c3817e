"""Checks of what a model's folder holds: the backend, and the scripts of the Python backend."""

from collections.abc import Iterator

from app.domain.model import RepositoryModel
from app.domain.nearest import nearest
from app.pipelines.linter.findings import Code, Finding

BACKENDS = (
    *("ensemble", "python", "onnxruntime", "tensorrt", "pytorch", "tensorflow", "openvino", "vllm", "tensorrtllm"),
    *("dali", "fil", "identity", "repeat", "square"),
)
"""Those of NVIDIA's images."""
PLATFORMS = (
    *("ensemble", "onnxruntime_onnx", "tensorrt_plan", "pytorch_libtorch"),
    *("tensorflow_savedmodel", "tensorflow_graphdef"),
)


def unknown_backends(model: RepositoryModel) -> Iterator[Finding]:
    if model.files is None:
        return
    backend = model.files.backend
    if not backend:
        text = "config.pbtxt names no backend, and no file such as 1/model.py or 1/model.onnx tells which one it is"
        yield Finding(Code.UNKNOWN_BACKEND, text, model.folder)
    elif backend not in (*BACKENDS, *PLATFORMS):
        text = f"backend '{backend}' is not one of NVIDIA's images, and Triton needs it installed"
        yield Finding(Code.UNKNOWN_BACKEND, text + nearest(backend, BACKENDS), model.folder)


def scripts(model: RepositoryModel) -> Iterator[Finding]:
    if model.files is None:
        return
    for path in model.files.lacks:
        text = f"{path} does not exist: the Python backend needs this script in each version"
        yield Finding(Code.MISSING_SCRIPT, text, model.folder)
    for mistake in model.files.mistakes:
        yield Finding(Code.SCRIPT_SYNTAX, mistake, model.folder)
