"""How models answer: responses, errors of children, deadlines, early exits, the log of tensors, states of sequences."""

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from model_kit.child_errors import exception_of
from model_kit.deadline import PARAMETER, deadline_check
from model_kit.outcomes import Cancelled, EarlyExit, InvalidInput, Overloaded
from model_kit.sequences import NOT_OPEN, Limits, Sequences, Step
from model_kit.signed_exit import key_of, signed_exit

from app.core.errors import UpstreamError
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.spec import EarlyExitRule, ErrorMatch

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


FAULTS = {"IMAGE is truncated or corrupt"}


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("IMAGE is truncated or corrupt", InvalidInput),
        ("x IMAGE is truncated or corrupt", RuntimeError),
        ("IMAGE is truncated or corrupt\n", RuntimeError),
        ("IMAGE", RuntimeError),
        ("", RuntimeError),
        ("cancelled", Cancelled),
        ("[request id: 5] Exceeds maximum queue size", Overloaded),
        ("Request timeout expired", Overloaded),
    ],
)
def test_the_message_of_a_child_decides_the_error(message, kind):
    assert isinstance(exception_of(message, FAULTS), kind)


class Request:
    def __init__(self, **parameters):
        self._parameters = parameters

    def parameters(self):
        return json.dumps(self._parameters)


def test_after_the_deadline_the_work_is_cancelled():
    deadline_check(Request(**{PARAMETER: time.time() * 1000 + 10_000}))()
    deadline_check(Request())()
    with pytest.raises(Cancelled):
        deadline_check(Request(**{PARAMETER: time.time() * 1000 - 1}))()


KEY = b"a key of sixteen bytes or more"


def test_a_signed_exit_is_an_early_exit_and_accepted_from_an_ensemble():
    exit_ = signed_exit("decide", "no_text", "r1", KEY)
    assert type(exit_) is EarlyExit
    assert exit_.reason == "no_text"
    rule = EarlyExitRule(reason="no_text", error=ErrorMatch(code="any", signed=True))
    rules = EarlyExitRules((rule,), frozenset({"ocr"}), KEY)
    for message in (str(exit_), f"in ensemble 'ocr', {exit_}"):
        assert rules.reason_of_error(UpstreamError(None, message), "r1") == "no_text"


def test_the_key_is_read_from_the_environment_of_triton():
    assert key_of({"EARLY_EXIT_KEY": "ä" * 8}) == ("ä" * 8).encode()
    for environment in ({}, {"EARLY_EXIT_KEY": ""}):
        with pytest.raises(RuntimeError, match=r"EARLY_EXIT_KEY is not set.*GATEWAY_EARLY_EXIT_KEY"):
            key_of(environment)


OUTPUTS = {
    "TEXT": np.array([b"a secret"], dtype=np.object_),
    "BOXES": np.zeros((0, 4, 2), np.float32),
    "IDS": np.array([7, 8], np.int32),
    "FLAG": np.array(True),
}


@pytest.mark.parametrize("value", ["shapes", "off", ""])
def test_a_line_has_names_datatypes_and_shapes(monkeypatch, value):
    lines, backend = [], ModuleType("triton_python_backend_utils")
    backend.Logger = SimpleNamespace(log_info=lines.append)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setenv("GATEWAY_LOG_TENSORS", value)
    monkeypatch.delitem(sys.modules, "model_kit.tensor_log", raising=False)
    notes_on = importlib.import_module("model_kit.tensor_log").notes_on
    is_on = value == "shapes"
    notes_on(SimpleNamespace(request_id=lambda: "r1") if is_on else SimpleNamespace())(OUTPUTS)
    line = "tensors triton_request_id=r1 TEXT:BYTES[1] BOXES:FP32[0, 4, 2] IDS:INT32[2] FLAG:BOOL[]"
    assert lines == [line] * is_on


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sequences(clock):
    """Three places, and 10 s without a step. A state is the list of its values."""
    return Sequences(Limits(states=3, idle_s=10), list, clock)


def step(sequences, sequence_id, value, *, starts=False, ends=False):
    with sequences.state_of(Step(sequence_id, starts, ends)) as state:
        state.append(value)
        return list(state)


def test_interleaved_sequences_have_states_until_their_last_step(sequences):
    assert step(sequences, 1, "a", starts=True) == ["a"]
    assert step(sequences, 2, "x", starts=True) == ["x"]
    assert step(sequences, 1, "b", ends=True) == ["a", "b"]
    assert step(sequences, 2, "y") == ["x", "y"]
    assert len(sequences) == 1
    assert step(sequences, 3, "a", starts=True, ends=True) == ["a"]
    assert len(sequences) == 1


def test_a_start_begins_again_and_an_unknown_sequence_must_start(sequences):
    step(sequences, 1, "a", starts=True)
    assert step(sequences, 1, "b", starts=True) == ["b"]
    assert len(sequences) == 1
    with pytest.raises(InvalidInput, match=NOT_OPEN):
        step(sequences, 2, "a")


def test_the_longest_unused_state_makes_place(sequences):
    for sequence_id in (1, 2, 3):
        step(sequences, sequence_id, sequence_id, starts=True)
    step(sequences, 1, "again")
    step(sequences, 4, 4, starts=True)
    assert len(sequences) == 3
    with pytest.raises(InvalidInput):
        step(sequences, 2, "late")


def test_idle_states_are_freed_at_the_next_start(sequences, clock):
    step(sequences, 1, "idle", starts=True)
    clock.now_s = 6
    step(sequences, 2, "used", starts=True)
    clock.now_s = 10.5
    step(sequences, 3, "new", starts=True)
    assert len(sequences) == 2
    assert step(sequences, 2, "again") == ["used", "again"]


@pytest.mark.parametrize(("ends", "left"), [(False, 1), (True, 0)])
def test_a_failed_step_frees_the_state_only_if_it_is_the_last(sequences, ends, left):
    with pytest.raises(ValueError, match="x"), sequences.state_of(Step(1, True, ends)):
        raise ValueError("x")
    assert len(sequences) == left


def test_limits_are_those_of_the_configuration():
    batching = {"oldest": {"max_candidate_sequences": 4}, "max_sequence_idle_microseconds": 60_000_000}
    args = {"model_config": json.dumps({"sequence_batching": batching})}
    assert Limits.of(args) == Limits(states=4, idle_s=120)
