"""The settings for the networks of rapidocr-onnxruntime in Triton."""

from typing import Any

from rapidocr_onnxruntime.main import DEFAULT_CFG_PATH
from rapidocr_onnxruntime.utils import read_yaml, update_model_path


def stage_settings(stage: str, **changes: Any) -> dict[str, Any]:
    """The package's settings of a stage (``Det``, ``Rec``) with one thread: Triton runs instances in parallel."""
    settings = update_model_path(read_yaml(DEFAULT_CFG_PATH))[stage]
    return {**settings, "intra_op_num_threads": 1, "inter_op_num_threads": 1, **changes}
