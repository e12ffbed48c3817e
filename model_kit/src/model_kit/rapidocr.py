"""The settings under which the networks carried by rapidocr-onnxruntime run inside Triton."""

from typing import Any

from rapidocr_onnxruntime.main import DEFAULT_CFG_PATH
from rapidocr_onnxruntime.utils import read_yaml, update_model_path


def stage_settings(stage: str, **changes: Any) -> dict[str, Any]:
    """The package's settings of a stage (``Det``, ``Rec``), on one thread: parallelism is for Triton's instances."""
    settings = update_model_path(read_yaml(DEFAULT_CFG_PATH))[stage]
    return {**settings, "intra_op_num_threads": 1, "inter_op_num_threads": 1, **changes}
