"""The line that a model writes of a response's tensors."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


@pytest.fixture
def tensor_log(monkeypatch):
    """``model_kit.tensor_log`` under a value of GATEWAY_LOG_TENSORS, and what it logs."""

    def tensor_log(value):
        said = []
        backend = ModuleType("triton_python_backend_utils")
        backend.Logger = SimpleNamespace(log_info=said.append)
        monkeypatch.setitem(sys.modules, backend.__name__, backend)
        monkeypatch.setenv("GATEWAY_LOG_TENSORS", value)
        monkeypatch.delitem(sys.modules, "model_kit.tensor_log", raising=False)
        return importlib.import_module("model_kit.tensor_log"), said

    return tensor_log


OUTPUTS = {
    "TEXT": np.array([b"a secret"], dtype=np.object_),
    "BOXES": np.zeros((0, 4, 2), np.float32),
    "IDS": np.array([7, 8], np.int32),
    "FLAG": np.array(True),
}


def test_names_datatypes_and_shapes_in_the_protocols_words(tensor_log):
    module, said = tensor_log("shapes")
    module.notes_on(SimpleNamespace(request_id=lambda: "r1"))(OUTPUTS)
    assert said == ["tensors triton_request_id=r1 TEXT:BYTES[1] BOXES:FP32[0, 4, 2] IDS:INT32[2] FLAG:BOOL[]"]


@pytest.mark.parametrize("value", ["off", ""])
def test_no_lines_without_the_setting(tensor_log, value):
    module, said = tensor_log(value)
    module.notes_on(SimpleNamespace())(OUTPUTS)
    assert said == []
