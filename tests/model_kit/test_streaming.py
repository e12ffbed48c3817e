"""A decoupled answer ends with exactly one FINAL, sent together with the last response or the error."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

FINAL = 1


class Sender:
    """Triton's response sender. Like the real sender, it rejects every call after FINAL."""

    def __init__(self, is_gone=False):
        self.sent = []
        self._is_gone = is_gone

    def send(self, response=None, flags=0):
        if self.sent and self.sent[-1][1] == FINAL:
            raise RuntimeError("Response sender has been closed")
        self.sent.append((response, flags))

    def is_cancelled(self):
        return self._is_gone


@pytest.fixture
def streaming(monkeypatch):
    """``model_kit.streaming`` over a fake of the Python backend."""
    backend = ModuleType("triton_python_backend_utils")
    backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    backend.Tensor = lambda name, array: (name, array.tolist())
    backend.InferenceResponse = lambda tensors=(), error=None: error or list(tensors)
    backend.TritonError = type("TritonError", (str,), {"__new__": lambda cls, text, code: str.__new__(cls, code)})
    for code in ("INVALID_ARG", "CANCELLED", "INTERNAL"):
        setattr(backend.TritonError, code, code)
    backend.Logger = SimpleNamespace(log_error=lambda text: None)
    backend.get_model_dir = lambda: "/models/some_model/1"
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "model_kit/src"))
    for module in ("model_kit", "model_kit.serving", "model_kit.streaming"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module("model_kit.streaming")


@pytest.fixture
def sent(streaming):
    """Returns the sent responses for one request whose parts ``accept`` creates."""

    def sent(accept):
        sender = Sender()
        streaming.stream_each([SimpleNamespace(get_response_sender=lambda: sender)], accept, lambda task: task())
        return sender.sent

    return sent


def test_final_is_sent_once_at_the_end(streaming, sent):
    last = [streaming.Part({"X": np.array([1])}), streaming.Part({"X": np.array([2])}, is_last=True)]
    assert sent(lambda request, is_gone: iter(last)) == [([("X", [1])], 0), ([("X", [2])], FINAL)]
    assert sent(lambda request, is_gone: [streaming.Part({})]) == [([], 0), (None, FINAL)]
    assert sent(lambda request, is_gone: None) == [(None, FINAL)]


def test_final_is_sent_with_the_error(streaming, sent):
    outcomes = importlib.import_module("model_kit.outcomes")

    def failing(error):
        def accept(request, is_gone):
            raise error

        return accept

    def parts():
        yield streaming.Part({})
        raise outcomes.Cancelled

    assert sent(failing(outcomes.InvalidInput("no"))) == [("INVALID_ARG", FINAL)]
    assert sent(failing(ZeroDivisionError("text of the caller"))) == [("INTERNAL", FINAL)]
    assert sent(lambda request, is_gone: parts()) == [([], 0), ("CANCELLED", FINAL)]


def test_a_failing_sender_does_not_end_the_thread(streaming):
    closed = Sender()
    closed.send(flags=FINAL)
    streaming.relay(closed, [streaming.Part({}, is_last=True)])
    assert len(closed.sent) == 1


def test_final_is_delayed_after_a_disconnect(streaming, monkeypatch):
    waits = []
    monkeypatch.setattr(streaming.time, "sleep", waits.append)
    for error in (None, "no"):
        here, gone = Sender(), Sender(is_gone=True)
        streaming.send_final(here, error)
        assert waits == []
        streaming.send_final(gone, error)
        assert waits.pop() == streaming.SETTLE_S
        assert here.sent == gone.sent == [(error, FINAL)]
    gone = Sender(is_gone=True)
    streaming.relay(gone, [streaming.Part({}), streaming.Part({}, is_last=True)])
    assert waits == [streaming.SETTLE_S]
    assert [flags for _, flags in gone.sent] == [0, FINAL]
