"""The log line that a model writes about the tensors of a response."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


@pytest.fixture
def tensor_log(monkeypatch):
    """Returns ``model_kit.tensor_log`` for a value of GATEWAY_LOG_TENSORS, and the list of its log lines."""

    def tensor_log(value):
        lines = []
        backend = ModuleType("triton_python_backend_utils")
        backend.Logger = SimpleNamespace(log_info=lines.append)
        monkeypatch.setitem(sys.modules, backend.__name__, backend)
        monkeypatch.setenv("GATEWAY_LOG_TENSORS", value)
        monkeypatch.delitem(sys.modules, "model_kit.tensor_log", raising=False)
        return importlib.import_module("model_kit.tensor_log"), lines

    return tensor_log


OUTPUTS = {
    "TEXT": np.array([b"a secret"], dtype=np.object_),
    "BOXES": np.zeros((0, 4, 2), np.float32),
    "IDS": np.array([7, 8], np.int32),
    "FLAG": np.array(True),
}


def test_a_line_has_names_datatypes_and_shapes(tensor_log):
    module, lines = tensor_log("shapes")
    module.notes_on(SimpleNamespace(request_id=lambda: "r1"))(OUTPUTS)
    assert lines == ["tensors triton_request_id=r1 TEXT:BYTES[1] BOXES:FP32[0, 4, 2] IDS:INT32[2] FLAG:BOOL[]"]


@pytest.mark.parametrize("value", ["off", ""])
def test_no_lines_without_the_setting(tensor_log, value):
    module, lines = tensor_log(value)
    module.notes_on(SimpleNamespace())(OUTPUTS)
    assert lines == []
