import json

import pytest
from model_kit.outcomes import InvalidInput
from model_kit.sequences import NOT_OPEN, Limits, Sequences, Step


class Clock:
    def __init__(self):
        self.now_s = 0.0

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


def test_interleaved_sequences_have_states_of_their_own(sequences):
    assert step(sequences, 1, "a", starts=True) == ["a"]
    assert step(sequences, 2, "x", starts=True) == ["x"]
    assert step(sequences, 1, "b") == ["a", "b"]
    assert step(sequences, 2, "y") == ["x", "y"]


def test_the_last_step_frees_the_state(sequences):
    step(sequences, 1, "a", starts=True)
    assert step(sequences, 1, "b", ends=True) == ["a", "b"]
    assert step(sequences, 2, "a", starts=True, ends=True) == ["a"]
    assert len(sequences) == 0


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
